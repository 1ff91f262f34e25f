"""local_sgd: replicas train separately for some steps; then an outer step averages their differences."""
