"""Real runs of the `distbelief` command: started, watched, disturbed and compared."""
