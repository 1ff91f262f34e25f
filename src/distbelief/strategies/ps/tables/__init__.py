"""Sparse tables: the module that a model uses, which rows are where, how they begin, are added, changed and saved."""
