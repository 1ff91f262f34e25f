"""The stage that forks members (it lies with the contract tests), for every test of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "contract"))

from forked_stage import stage

__all__ = ["stage"]
