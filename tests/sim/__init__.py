"""Whole clusters in one thread: the real decisions of coordinator and workers, a virtual clock, seeded faults."""
