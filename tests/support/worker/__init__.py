"""Members that evaluate and save."""
