"""Tensor parallelism: which layers are divided, and how they are divided."""
