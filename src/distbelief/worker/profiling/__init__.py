"""Where a worker's time goes, recorded for some steps of a run. Nothing of it exists in a run that is not profiled."""
