"""Deferred initialisation: the exact initial values of any part of a model, without ever having all of it in memory."""
