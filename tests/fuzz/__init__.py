"""Frames that nobody of ours would send, at every decoder and every listening socket. `python -m fuzz --help`."""
