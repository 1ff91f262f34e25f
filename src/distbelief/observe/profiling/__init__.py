"""From what workers have recorded of some steps to one trace, and to a table of where the time went."""
