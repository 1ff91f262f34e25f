"""The engine for Ray clusters: an agent per node, a coordinator that Ray restarts, and a driver that watches.

Ray is imported inside of functions only: it is an optional dependency, and other users need not import it.
"""
