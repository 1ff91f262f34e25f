"""Where a worker's time goes, recorded for some steps of a run. Nothing of it is loaded where no profile is taken."""
