"""A coordinator that is fed with messages, in this process or as a process."""
