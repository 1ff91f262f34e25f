"""Sparse tables on parameter servers.

A model uses `EmbeddingTable` (embedding.py). specs.py lists the tables of a run with the optimizers of their rows
(rowoptimizers.py); rowbuckets.py says in which part a row lies. A worker pulls and pushes rows through `RemoteTables`
(remote.py), with the row gradients of rowgradients.py and the messages of messages.py. On a server slices.py is a part
of the tables, and store.py holds its rows. rowinit.py computes first values, and saved.py reads and writes checkpoints.
"""
