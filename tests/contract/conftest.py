"""The stage that forks members, for every test of this folder."""

from forked_stage import stage

__all__ = ["stage"]
