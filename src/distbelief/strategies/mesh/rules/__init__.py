"""Decisions about divided models, as pure functions and data."""
