"""Parameter servers, the workers' side: what they compute, push and fetch; how the parameters are cut into slices."""
