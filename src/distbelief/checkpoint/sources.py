"""Reads trained weights from a run, a checkpoint, a folder of checkpoints, or a safetensors file.

This is the one module that turns a path or URL into weights. It verifies a checkpoint before it returns any tensor, and
never unpickles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
import torch

from distbelief.checkpoint.faults import CheckpointDamaged, CheckpointUnusable
from distbelief.checkpoint.lazy import Extent, Filling, LazyTensors, Outline, Renamed, Wanted
from distbelief.checkpoint.manifest import MANIFEST, Manifest, step_name, step_of
from distbelief.checkpoint.parts import LENGTH_BYTES, begins, decode_header, pour, read_header
from distbelief.checkpoint.reading import newest_sound, open_checkpoint
from distbelief.checkpoint.records import read_record
from distbelief.checkpoint.rules.boxes import Box
from distbelief.checkpoint.storage import Folder, Where, folder_at, size_of
from distbelief.checkpoint.tensorforms import differences, forms, misfit
from distbelief.checkpoint.weights import KINDS
from distbelief.errors import DistBeliefError

# --- a safetensors file of weights --------------------------------------------------------------------------------

_TYPES: dict[str, torch.dtype] = {kind: getattr(torch, name) for name, kind in KINDS.items()}


class WeightsFile(LazyTensors):
    def __init__(self, folder: Folder, name: str, outlines: Mapping[str, Outline], first: Mapping[str, int]) -> None:
        """`first`: the offset of each tensor's bytes in the file."""
        super().__init__(outlines)
        self._folder = folder
        self._name = name
        self._first = first

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [self._read_box(name, box) for name, box in wanted]

    def _read_box(self, name: str, box: Box) -> torch.Tensor:
        into = self.blank(name, box)
        if into.numel():
            shape = self.outlines[name][1]
            filling = Filling(Extent.of(shape, 0, prod(shape), None), box, into)
            with _said_of(self._folder.url_of(self._name)):
                pour(self._folder, self._name, self._first[name], filling.spans(), filling)
        return into


def open_weights(where: Where) -> WeightsFile:
    """
    >>> import fsspec, safetensors.torch
    >>> fsspec.filesystem("memory").pipe("/file/w.safetensors", safetensors.torch.save({"w": torch.eye(3)}))
    >>> weights = open_weights("memory://file/w.safetensors")
    >>> weights.outlines, weights.read_box("w", ((1, 3), (1, 2)))
    ({'w': (torch.float32, (3, 3))}, tensor([[1.],
            [0.]]))
    """
    url = folder_at(where).url
    parent, _, name = url.rpartition("/")
    folder = folder_at(parent or "/")
    size_bytes = size_of(folder, name)
    if size_bytes is None:
        raise DistBeliefError(f"there is no {url}", hint="give a safetensors file")
    with _said_of(url):
        header = read_header(folder, name, size_bytes)
    order, fault = decode_header(header, max(0, size_bytes - LENGTH_BYTES - len(header)))
    outlines: dict[str, Outline] = {}
    for tensor in order:
        if tensor.kind not in _TYPES:
            raise DistBeliefError(f"{url}: tensor '{tensor.key}' is of the type {tensor.kind}, which is not known here")
        dtype = _TYPES[tensor.kind]
        outlines[tensor.key] = dtype, tensor.shape
        if any(size < 0 for size in tensor.shape) or prod(tensor.shape) * dtype.itemsize != tensor.size_bytes:
            fault = f"'{tensor.key}' has {tensor.size_bytes} bytes, which is not right for its type and shape"
    if fault:
        raise _damaged(url, fault)
    if not outlines:
        raise DistBeliefError(f"{url} holds no tensors")
    return WeightsFile(folder, name, outlines, begins(order, LENGTH_BYTES + len(header)))


@contextmanager
def _said_of(url: str) -> Iterator[None]:
    """Reports damage as an error of this file: there is no older checkpoint to fall back to."""
    try:
        yield
    except CheckpointDamaged as error:
        raise _damaged(url, error.message.removeprefix(f"{url} ")) from error


def _damaged(url: str, fault: str) -> DistBeliefError:
    return DistBeliefError(f"{url} is damaged, or no safetensors file: {fault}", hint="restore it from a copy")


SUFFIX = ".safetensors"
MODEL = "model/"
"""Prefix of the names of a model's tensors in a checkpoint."""
_WANTED = (
    "give a run directory, as `train` printed it, a checkpoint (…/step-000000120), a folder of checkpoints, "
    f"or a {SUFFIX} file"
)


class RecordedJob(msgspec.Struct, frozen=True):
    """The job's origin, from job.json."""

    file: str = ""
    """Empty: the job was made by a Python program."""
    settings: dict[str, str] = {}


class _RecordedLaunch(msgspec.Struct, frozen=True):
    """The checkpoint folder of a run, from launch.json."""

    checkpoints: str = ""


class _Names(msgspec.Struct, frozen=True):
    """The names of the model's tensors, from a manifest's `job`."""

    tied: dict[str, str] = {}
    """Another name of a tensor -> the name under which it is saved."""
    transient: list[str] = []
    """Names of buffers that `load_state_dict` does not expect under any name."""

    def is_wanted(self, name: str) -> bool:
        return name not in self.transient and self.tied.get(name) not in self.transient


@dataclass(frozen=True)
class Source:
    """Tensors as `load_state_dict` expects them, and their run if it is known."""

    path: str | Path
    tensors: Mapping[str, torch.Tensor]
    run_dir: Path | None
    checkpoint: str = ""
    """The checkpoint of the tensors; empty: a file of weights."""
    skipped: tuple[str, ...] = ()
    """The fault of each newer checkpoint that could not be used, newest first."""


_Take = Callable[[LazyTensors], Mapping[str, torch.Tensor]]
"""Converts tensors that are not read yet."""


def read_source(where: str | Path) -> Source:
    """Read the weights at a path or URL, in any of the supported forms, into memory.

    >>> from distbelief.checkpoint.manifest import Facts
    >>> from distbelief.checkpoint.parts import Slice
    >>> from distbelief.checkpoint.saving import seal, write_part
    >>> part = write_part("memory://run", 120, 1, 1, [Slice.whole("model/w", torch.ones(2))])
    >>> _ = seal("memory://run", 120, Facts(), [part])
    >>> source = read_source("memory://run")
    >>> source.checkpoint, source.tensors
    ('memory://run/step-000000120', {'w': tensor([1., 1.])})
    """
    return _source(where, lambda tensors: tensors.read_whole())


def open_source(where: str | Path) -> Source:
    """Like `read_source`, but `tensors` are `LazyTensors`. The files must stay in place until all wanted tensors are
    read."""

    def checked(tensors: LazyTensors) -> LazyTensors:
        tensors.check()
        return tensors

    return _source(where, checked)


def _source(where: str | Path, take: _Take) -> Source:
    place = folder_at(where)
    if not place.local:
        is_file = place.url.endswith(SUFFIX)
        return Source(place.url, take(open_weights(where)), None) if is_file else _folder(where, place.url, take)
    path = Path(os.fspath(where).removeprefix("file://"))
    if path.is_dir():
        return _run(path, take) if _is_run(path) else _folder(path, place.url, take)
    if not path.exists():
        raise DistBeliefError(f"there is no {path}", hint=_WANTED)
    if path.suffix != SUFFIX:
        raise DistBeliefError(f"{path} is neither a folder nor a {SUFFIX} file", hint=_WANTED)
    return Source(path, take(open_weights(path)), None)


def recorded_job(run_dir: Path) -> RecordedJob:
    """The job of a run, from its job.json."""
    return read_record(run_dir / "job.json", RecordedJob)


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("weights.safetensors", "job.json", "journal.jsonl"))


def _run(run_dir: Path, take: _Take) -> Source:
    """The weights of a completed run, else of the run's newest sound checkpoint."""
    weights = run_dir / "weights.safetensors"
    if weights.exists():
        return Source(run_dir, take(open_weights(weights)), run_dir)
    folder = _checkpoints_of(run_dir)
    found, skipped = _newest(folder, take)
    if found is None:
        raise DistBeliefError(
            f"the run {run_dir} has no weights yet: it has not finished, or it failed",
            hint=f"weights.safetensors is written when the last step is done; no sound checkpoint is in {folder}",
            details="\n".join(skipped),
        )
    tensors, url = found
    return Source(run_dir, tensors, run_dir, url, skipped)


def _checkpoints_of(run_dir: Path) -> str:
    file = run_dir / "launch.json"
    named = read_record(file, _RecordedLaunch).checkpoints if file.exists() else ""
    return named or str(run_dir / "checkpoints")


def _folder(where: str | Path, url: str, take: _Take) -> Source:
    """A checkpoint, or the newest sound one of a folder. A checkpoint that the user named is never replaced by
    another."""
    parent, _, name = url.rpartition("/")
    step = step_of(name)
    if step is not None:
        return Source(where, take(_weights(parent, step)), None, url)
    found, skipped = _newest(url, take)
    if found is None and not skipped:
        raise DistBeliefError(
            f"{where} is neither a run directory nor a folder of checkpoints: "
            f"it has no job.json, and no {step_name(120)}/{MANIFEST} or the like",
            hint=_WANTED,
        )
    if found is None:
        raise DistBeliefError(
            f"no checkpoint in {where} is sound: {skipped[0]}",
            hint="restore one from a copy",
            details="\n".join(skipped),
        )
    tensors, checkpoint = found
    return Source(where, tensors, None, checkpoint, skipped)


def _newest(folder: str, take: _Take) -> tuple[tuple[Mapping[str, torch.Tensor], str] | None, tuple[str, ...]]:
    """The weights of the newest sound checkpoint and its URL, or None; and the faults of newer checkpoints."""

    def read(folder: Where, step: int) -> tuple[Mapping[str, torch.Tensor], str]:
        return take(_weights(str(folder), step)), f"{folder}/{step_name(step)}"

    found, faults = newest_sound(folder_at(folder).url, read)
    return found, tuple(why for _, why in faults)


def _weights(folder: str, step: int) -> LazyTensors:
    """The model's tensors in a checkpoint. Parts without tensors of the model are not read."""
    manifest, held = open_checkpoint(folder, step)
    url = f"{folder}/{step_name(step)}"
    names = _names(manifest, url)
    saved = {name.removeprefix(MODEL): name for name in held if name.startswith(MODEL)}
    if lost := sorted(set(names.tied.values()) - saved.keys()):
        raise CheckpointDamaged(f"{url} is refused: a tensor is tied to '{lost[0]}', which is not in it")
    everywhere = saved | {other: saved[first] for other, first in names.tied.items()}
    found = {name: everywhere[name] for name in sorted(everywhere) if names.is_wanted(name)}
    if not found:
        raise CheckpointUnusable(f"{url} holds no weights: no tensor in it is called {MODEL}…")
    return Renamed(held, found)


def _names(manifest: Manifest, url: str) -> _Names:
    try:
        return msgspec.convert(manifest.job, type=_Names)
    except msgspec.ValidationError as error:
        raise CheckpointDamaged(f"{url}/{MANIFEST} is refused: in `job`, {error}") from error


# --- the element-wise mean of several models, for `distbelief average` --------------------------------------------
# Values are summed in float64 in the given order, then rounded once.

_ONE_ROUNDING_AWAY = {torch.float64, torch.float32, torch.complex128, torch.complex64}


def average(sources: Sequence[Source], weights: Sequence[float] | None = None) -> dict[str, torch.Tensor]:
    """Σ wᵢ·xᵢ / Σ wᵢ of each floating tensor. Integer and boolean tensors have no mean: they must be equal in all
    sources."""
    shares = [1.0] * len(sources) if weights is None else weights
    _require_one_model(sources)
    _require_equal_integers(sources)
    return {
        name: _mean(name, sources, shares) if _has_mean(tensor) else tensor
        for name, tensor in sources[0].tensors.items()
    }


def round_once(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert float64 to `dtype` with a single rounding, to the nearest, ties to even.

    torch converts to the smaller types through float32 and so rounds twice, which is wrong near a tie. This function
    rounds to odd on the way (towards zero, with the last bit set if anything was cut off), which preserves the
    information for the second rounding.

    >>> near_a_tie = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    >>> near_a_tie.to(torch.float16).item(), round_once(near_a_tie, torch.float16).item()
    (1.0, 1.0009765625)
    """
    if dtype in _ONE_ROUNDING_AWAY:
        return exact.to(dtype)
    nearest = exact.to(torch.float32)
    too_far = nearest.to(torch.float64).abs() > exact.abs()
    cut = torch.where(too_far, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    odd = (cut.view(torch.int32) | 1).view(torch.float32)
    return torch.where(cut.to(torch.float64) != exact, odd, cut).to(dtype)


def _require_one_model(sources: Sequence[Source]) -> None:
    first = sources[0]
    lines = [
        line
        for other in sources[1:]
        for line in differences(forms(first.tensors), str(first.path), forms(other.tensors), str(other.path))
    ]
    if lines:
        raise misfit("these are not weights of one model", lines, hint="average runs of the same job and settings")


def _require_equal_integers(sources: Sequence[Source]) -> None:
    first = sources[0]
    lines = [
        f"{name}: {first.path} and {other.path} hold other values"
        for other in sources[1:]
        for name, tensor in sorted(first.tensors.items())
        if not _has_mean(tensor) and not torch.equal(tensor, other.tensors[name])
    ]
    if lines:
        raise misfit(
            "tensors of whole numbers or booleans have no mean and must agree",
            lines,
            hint="counters such as BatchNorm's num_batches_tracked agree after the same number of steps",
        )


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mean(name: str, sources: Sequence[Source], shares: Sequence[float]) -> torch.Tensor:
    like = sources[0].tensors[name]
    total = torch.zeros(like.shape, dtype=torch.complex128 if like.is_complex() else torch.float64)
    for source, share in zip(sources, shares, strict=True):
        total += source.tensors[name].to(total.dtype) * share
    total /= sum(shares)
    if total.isnan().any():
        culprits = [str(source.path) for source in sources if source.tensors[name].isnan().any()]
        raise DistBeliefError(
            f"{name}: the average is not a number",
            hint=f"leave out {', '.join(culprits)}" if culprits else "the sources hold infinities of both signs",
        )
    return round_once(total, like.dtype)
