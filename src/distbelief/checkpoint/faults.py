"""What can be wrong with a checkpoint, one class per thing to do about it."""

from __future__ import annotations

from distbelief.errors import DistBeliefError


class StorageFailed(DistBeliefError):
    """The disk or the object store did not do what it was asked: full, read-only, forbidden, out of reach."""


class CheckpointExists(DistBeliefError):
    """This step is sealed already. Its files are never written again, so that a sound checkpoint stays sound."""


class CheckpointIncomplete(DistBeliefError):
    """The parts do not hold every element of every tensor exactly once, so they are not sealed."""


class CheckpointMismatch(DistBeliefError):
    """The checkpoint is sound, but of another model; `details` has a line for each tensor that differs."""


class CheckpointUnusable(DistBeliefError):
    """This checkpoint cannot be loaded; an older one may be."""


class CheckpointMissing(CheckpointUnusable):
    """There is no manifest, so there is no checkpoint."""


class CheckpointDamaged(CheckpointUnusable):
    """A file is missing, torn or changed; the message names it."""


class CheckpointFormat(CheckpointUnusable):
    """Written in a format that this version does not read."""
