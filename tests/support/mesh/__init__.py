"""Models to divide, and members of a divided model in real processes."""
