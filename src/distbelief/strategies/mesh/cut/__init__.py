"""Cutting a model into stages of a pipeline."""
