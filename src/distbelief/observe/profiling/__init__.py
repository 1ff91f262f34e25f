"""Merges the workers' recordings of some steps into one trace, and summarises where the time went."""
