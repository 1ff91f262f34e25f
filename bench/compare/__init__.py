"""The comparison: all systems on the same workloads, in one run, with the tables, figures and page made of it."""
