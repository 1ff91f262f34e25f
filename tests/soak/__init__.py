"""A run of two hosts for minutes or hours under random faults: `python -m tests.soak`, or `make soak MINUTES=30`."""
