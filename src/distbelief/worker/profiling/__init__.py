"""Records where a worker's time goes, for some steps of a run. Imported only when a profile is taken."""
