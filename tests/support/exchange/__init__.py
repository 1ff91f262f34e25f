"""Members of an exchange in real processes, for the contract tests and those of `comm`."""
