"""What every strategy needs of sparse tables: `EmbeddingTable`, the gradients of its rows, and the rows' first values.

A table is an ordinary parameter unless a strategy puts its rows on servers. This folder imports no strategy. Servers,
messages and checkpoints of rows that lie on servers are in `strategies/ps/tables/`.
"""
