"""Replicas in one process, and members of the data-parallel strategy in real processes."""
