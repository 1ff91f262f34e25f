"""What the soak decides: which fault is next, and whether what was measured is as promised. Pure."""
