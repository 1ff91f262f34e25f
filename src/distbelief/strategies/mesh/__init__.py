"""Model parallelism: the members of a generation as a mesh of pipeline × data × sharded × tensor."""
