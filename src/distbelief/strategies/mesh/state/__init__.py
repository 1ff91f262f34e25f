"""The state of a divided model: applying steps, restoring, snapshots, checkpoints."""
