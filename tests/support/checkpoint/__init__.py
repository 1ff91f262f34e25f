"""Samples of checkpoints, boxes and stores, and how much memory a call needs."""
