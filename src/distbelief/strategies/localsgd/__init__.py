"""local_sgd: replicas train apart for some steps; then an outer step averages their differences."""
