"""The errors of checkpoints: one class for each way to handle them."""

from __future__ import annotations

from distbelief.errors import DistBeliefError


class StorageFailed(DistBeliefError):
    """The disk or the object store refused or failed: full, read-only, forbidden, or out of reach."""


class CheckpointExists(DistBeliefError):
    """This step is sealed already. A sealed checkpoint's files are never written again, so a sound checkpoint stays
    sound."""


class CheckpointIncomplete(DistBeliefError):
    """The parts do not hold every element of every tensor exactly once, so the checkpoint is not sealed."""


class CheckpointMismatch(DistBeliefError):
    """The checkpoint is sound but belongs to another model; `details` has a line for each tensor that differs."""


class CheckpointUnusable(DistBeliefError):
    """This checkpoint cannot be loaded; an older one may be."""


class CheckpointMissing(CheckpointUnusable):
    """The step has no manifest, so it has no checkpoint."""


class CheckpointDamaged(CheckpointUnusable):
    """A file is missing, torn or changed; the message names it."""


class CheckpointForeign(CheckpointUnusable):
    """Another run has saved this checkpoint."""


class CheckpointFormat(CheckpointUnusable):
    """The checkpoint has a format that this version does not read."""
