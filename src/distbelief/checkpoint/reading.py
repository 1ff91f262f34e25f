"""Finding, checking and loading checkpoints. Nothing is loaded that was not checked, and nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import torch

from distbelief.checkpoint import manifest as m
from distbelief.checkpoint.faults import CheckpointMissing, CheckpointUnusable
from distbelief.checkpoint.manifest import Manifest
from distbelief.checkpoint.storage import Folder, Where, entries, folder_at, read_file
from distbelief.checkpoint.stored import CheckpointTensors

Found = TypeVar("Found")


def list_checkpoints(folder: Where) -> list[int]:
    """The steps that have a manifest, newest first."""
    place = folder_at(folder)
    return [step for step in all_steps(place) if m.MANIFEST in entries(place / m.step_name(step))]


def all_steps(place: Folder) -> list[int]:
    """Every step that has a folder, sealed or not, newest first."""
    found = (m.step_of(name) for name, size in entries(place).items() if size is None)
    return sorted((step for step in found if step is not None), reverse=True)


def read_manifest(folder: Where, step: int) -> Manifest:
    """The manifest of a step, itself checked; the parts are not looked at."""
    place = folder_at(folder) / m.step_name(step)
    data = read_file(place, m.MANIFEST)
    if data is None:
        raise CheckpointMissing(
            f"there is no checkpoint of step {step}: {place.url_of(m.MANIFEST)} is missing",
            hint="a folder without it is the rest of a save that was cut short; choose another step",
        )
    return m.decode(data, place.url_of(m.MANIFEST), step)


def verify(folder: Where, step: int) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest. Raises CheckpointUnusable."""
    manifest = read_manifest(folder, step)
    _opened(folder, manifest, check=True).check()
    return manifest


def newest_sound(
    folder: Where, read: Callable[[Where, int], Found | None], at_most: int | None = None
) -> tuple[Found | None, list[tuple[int, str]]]:
    """What `read` makes of the newest checkpoint that can be used, and the newer ones that cannot: (step, why).

    `read` may pass one over by returning None. Only faults of a checkpoint are skipped. When the disk or the store
    cannot be read at all, that is raised: to start from an older step because of a lost connection would be wrong.
    The folder is listed again after each one: a run that goes on removes old checkpoints, perhaps the one that was
    being read, and has then sealed another.
    """
    tried: dict[int, str] = {}
    while left := [
        step for step in list_checkpoints(folder) if step not in tried and (at_most is None or step <= at_most)
    ]:
        tried[left[0]] = ""
        try:
            found = read(folder, left[0])
        except CheckpointUnusable as error:
            tried[left[0]] = error.message
        else:
            if found is not None:
                return found, _faults(tried)
    return None, _faults(tried)


def _faults(tried: Mapping[int, str]) -> list[tuple[int, str]]:
    return [(step, why) for step, why in tried.items() if why]


def read_tensors(folder: Where, manifest: Manifest, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, all or those named, as new CPU tensors. The parts they lie in are checked on the way.

    >>> from distbelief.checkpoint.manifest import Facts
    >>> from distbelief.checkpoint.parts import Slice
    >>> from distbelief.checkpoint.saving import seal, write_part
    >>> part = write_part("memory://read", 1, 1, 1, [Slice.whole("w", torch.ones(2))])
    >>> read_tensors("memory://read", seal("memory://read", 1, Facts(), [part]))
    {'w': tensor([1., 1.])}
    """
    tensors = _opened(folder, manifest, check=True)
    return tensors.read_whole([name for name in tensors if names is None or name in names])


def open_checkpoint(folder: Where, step: int, check: bool = True) -> tuple[Manifest, CheckpointTensors]:
    """A checkpoint whose tensors are read when they are asked for, whole or a box of them.

    With `check`, the first time that something of a part is wanted all of it is read, in front of its checksum. So
    `read_boxes` for all that is wanted reads every file that it needs once, and holds no more than what is wanted and
    a block for each of a few files. Without, only the bytes that are wanted are read: when somebody has verified it.

    >>> from distbelief.checkpoint.manifest import Facts
    >>> from distbelief.checkpoint.parts import Slice
    >>> from distbelief.checkpoint.saving import seal, write_part
    >>> columns = Slice.of_box("w", torch.ones(3, 1), (3, 2), ((0, 3), (0, 1)))
    >>> others = Slice.of_box("w", torch.zeros(3, 1), (3, 2), ((0, 3), (1, 2)))
    >>> parts = [write_part("memory://open", 1, k, 2, [piece]) for k, piece in enumerate([columns, others], start=1)]
    >>> _ = seal("memory://open", 1, Facts(), parts)
    >>> _, tensors = open_checkpoint("memory://open", 1)
    >>> tensors.outlines, tensors.read_box("w", ((1, 2), (0, 2)))
    ({'w': (torch.float32, (3, 2))}, tensor([[1., 0.]]))
    """
    manifest = read_manifest(folder, step)
    return manifest, _opened(folder, manifest, check)


def _opened(folder: Where, manifest: Manifest, check: bool) -> CheckpointTensors:
    return CheckpointTensors(folder_at(folder) / m.step_name(manifest.step), manifest, check)
