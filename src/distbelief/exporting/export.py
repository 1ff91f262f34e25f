"""Exports trained weights to a file for other programs: the tensors, a torch.export program, or ONNX."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.export import Dim, ExportedProgram, ShapesCollection

from distbelief.atomicfile import write_whole
from distbelief.checkpoint.sources import Source, recorded_job
from distbelief.checkpoint.tensorforms import differences, forms, misfit
from distbelief.checkpoint.weights import persistent_tensors, save_tensors
from distbelief.data.reading import Failure, Request, read
from distbelief.data.sources import InMemory, as_source, seed_everything, split_batch
from distbelief.errors import DistBeliefError, JobError
from distbelief.job import Job
from distbelief.strategies.flatmodel.compute import make_model
from distbelief.strategies.tables.embedding import densified
from distbelief.worker.jobfile import load_job

# --- the model of a run, rebuilt ----------------------------------------------------------------------------------
# It is made from the job file that job.json names, the run's settings and the trained weights. It is on the CPU, in
# evaluation mode; a few samples of the job's data are its arguments.

SAMPLES = 3  # more than 1: torch.export treats a dimension of 1 as a constant

_WEIGHTS_ONLY = "the weights alone can be exported: --to FILE.safetensors"


@dataclass(frozen=True)
class Inputs:
    """The model's arguments for a batch of `samples` samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int

    def leaves(self) -> list[Any]:
        return list(torch.utils._pytree.tree_leaves((self.args, self.kwargs)))

    def counts_samples(self, leaf: Any) -> bool:
        """Whether the leaf is a tensor whose first dimension counts samples."""
        return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == self.samples

    def longer(self) -> Inputs:
        """The same inputs with the first samples repeated at the end: only the batch size differs."""

        def grow(leaf: Any) -> Any:
            return torch.cat([leaf, leaf[: self.samples - 1]]) if self.counts_samples(leaf) else leaf

        args, kwargs = torch.utils._pytree.tree_map(grow, (self.args, self.kwargs))
        return Inputs(args, kwargs, 2 * self.samples - 1)


@dataclass(frozen=True)
class Rebuilt:
    job: Job
    model: torch.nn.Module
    inputs: Inputs

    def answer(self, inputs: Inputs, model: Callable[..., Any] | None = None) -> list[torch.Tensor]:
        """The output tensors of the model (or of another one in its place) for the inputs."""
        seed_everything(self.job.seed)  # a model with random numbers draws the same ones each time
        with torch.no_grad():
            output = (model or self.model)(*inputs.args, **inputs.kwargs)
        return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def rebuild(run_dir: Path, tensors: Mapping[str, torch.Tensor], where: str) -> Rebuilt:
    """The model of the run, with the tensors (read from `where`) as its weights."""
    job = _load(run_dir)
    model = _in_user_code("the model could not be made", lambda: make_model(job, torch.device("cpu"))).eval()
    tensors = densified(model, tensors)
    expected = persistent_tensors(model)
    lines = differences(forms(tensors), where, forms(expected), "the model")
    if lines:
        raise misfit(
            f"the weights do not fit the model that {job.name}'s job file makes now",
            lines,
            hint=f"has the job file changed since the run? Put it back as it was; or {_WEIGHTS_ONLY}",
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])
    rebuilt = Rebuilt(job, model, _some_inputs(job))
    _in_user_code("the model failed on a batch of its data", lambda: rebuilt.answer(rebuilt.inputs))
    return rebuilt


def _load(run_dir: Path) -> Job:
    recorded = recorded_job(run_dir)
    if not recorded.file:
        raise DistBeliefError(
            f"the job of {run_dir} came from a Python program, not from a file: its model cannot be made again",
            hint=_WEIGHTS_ONLY,
        )
    if not Path(recorded.file).is_file():
        raise DistBeliefError(
            f"the job file {recorded.file} is gone: the model of {run_dir} cannot be made again",
            hint=f"put it back; or {_WEIGHTS_ONLY}",
        )
    seed_everything(0)  # as a worker does before running a job file
    return load_job(Path(recorded.file), recorded.settings)


def _some_inputs(job: Job) -> Inputs:
    source = as_source(job.data, job.collate)
    samples = np.arange(min(SAMPLES, len(source)), dtype=np.int64)
    if isinstance(source, InMemory):
        batch = source.fetch(samples)
    else:
        batch = read(source, job.seed, Request(0, samples))
        if isinstance(batch, Failure):
            raise DistBeliefError(batch.message, details=batch.traceback)
    args, kwargs, _ = split_batch(batch)
    return Inputs(args, kwargs, len(samples))


def _in_user_code(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except DistBeliefError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        details = "".join(traceback.format_exception(error))
        raise JobError(f"{what}: {type(error).__name__}: {first}", details=details) from error


# --- the exported model against the original ----------------------------------------------------------------------

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative to the largest output, or to 1. Another order of additions stays far below; a wrong operation exceeds it."""


def largest_difference(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The largest difference between two corresponding numbers. Raises a DistBeliefError if rounding cannot explain it.

    >>> largest_difference([torch.ones(2)], [torch.ones(2) + 1e-6])
    9.5367431640625e-07
    """
    forms = [[(tensor.dtype, tuple(tensor.shape)) for tensor in side] for side in (expected, found)]
    if forms[0] != forms[1]:
        raise _wrong(f"{_listed(forms[1])} in place of {_listed(forms[0])}")
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        wide = torch.complex128 if one.is_complex() else torch.float64
        a, b = one.to(wide), other.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())  # equal infinities count as equal; their difference would be NaN
        if same.all():
            continue
        difference = (a - b).abs()[~same].max().item()
        scale = max(1.0, a.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
        if not difference <= _TOLERANCES.get(one.dtype, 0.0) * scale:
            raise _wrong(f"they differ by up to {difference:.3g}")
        largest = max(largest, difference)
    return largest


def in_words(difference: float, samples: Sequence[int]) -> str:
    """
    >>> in_words(0.0, [3, 5])
    'same output as the model, bit for bit, on batches of 3 and 5'
    """
    how = "bit for bit" if difference == 0 else f"within {difference:.1e}"
    sizes = f"batches of {' and '.join(map(str, samples))}" if len(samples) > 1 else f"a batch of {samples[0]}"
    return f"same output as the model, {how}, on {sizes}"


def _wrong(what: str) -> DistBeliefError:
    return DistBeliefError(
        f"the exported model gives other outputs than the model: {what}",
        hint="nothing was written; does the model give another output each time it is called?",
    )


def _listed(forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in forms) or "nothing"


# --- a torch.export program ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    program: ExportedProgram
    any_batch: bool
    """False: the model works, or can be traced, only with the batch size of the trace."""

    def trials(self, inputs: Inputs) -> list[Inputs]:
        """The inputs on which the exported model is compared with the original."""
        return [inputs, inputs.longer()] if self.any_batch else [inputs]


def trace(rebuilt: Rebuilt) -> Traced:
    """Trace the model, for any batch size if the model allows it."""
    inputs = rebuilt.inputs
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    batch = Dim("batch", min=1)
    for leaf in inputs.leaves():
        if inputs.counts_samples(leaf):
            shapes[leaf] = {0: batch}
    with quiet():
        try:
            dims = shapes.dynamic_shapes(rebuilt.model, inputs.args, inputs.kwargs)  # type: ignore[no-untyped-call]
            program = torch.export.export(rebuilt.model, inputs.args, inputs.kwargs, dynamic_shapes=dims, strict=False)
            any_batch = any(map(inputs.counts_samples, inputs.leaves()))
        # torch has no single class for it; if the batch size was not the reason, the next attempt fails, too
        except Exception:
            program = _trace_for_this_size(rebuilt)
            any_batch = False
    program.example_inputs = None  # otherwise the file would contain samples of the training data
    return Traced(program, any_batch)


def save_program(rebuilt: Rebuilt, traced: Traced, path: Path) -> tuple[float, str]:
    """Write the program to `path`, completely or not at all. Returns the largest difference of outputs, and a
    description of the check."""
    trials = traced.trials(rebuilt.inputs)

    def write(draft: Path) -> None:
        with draft.open("wb") as file:
            torch.export.save(traced.program, file)

    def check(draft: Path) -> float:
        with draft.open("rb") as file:
            loaded = torch.export.load(file).module()
        return max(largest_difference(rebuilt.answer(t), rebuilt.answer(t, loaded)) for t in trials)

    with quiet():
        difference = write_whole(path, write, check)
    return difference, f"loaded again: {in_words(difference, [t.samples for t in trials])}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's internal log messages (on a failure it prints the whole graph); errors are raised anyway."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _trace_for_this_size(rebuilt: Rebuilt) -> ExportedProgram:
    inputs = rebuilt.inputs
    try:
        return torch.export.export(rebuilt.model, inputs.args, inputs.kwargs, strict=False)
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DistBeliefError(
            f"torch.export cannot trace the model: {first}",
            hint="a model whose steps depend on its data's values cannot be traced; the weights can be exported: "
            "--to FILE.safetensors",
            details=str(error).strip(),
        ) from error


# --- ONNX ---------------------------------------------------------------------------------------------------------

LARGEST_BYTES = 1536 << 20  # of weights; above it torch writes a second file


def require_onnx() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise DistBeliefError(
            f"ONNX needs {' and '.join(missing)}, not installed here", hint="pip install 'distbelief[onnx]'"
        )


def save_onnx(rebuilt: Rebuilt, traced: Traced, path: Path) -> tuple[float | None, str]:
    """Write the model to `path`, completely or not at all. Returns the largest difference of outputs (None: the file
    was not run), and a description of the check."""
    weights_bytes = sum(t.numel() * t.element_size() for t in traced.program.state_dict.values())
    if weights_bytes > LARGEST_BYTES:
        raise DistBeliefError(
            f"{weights_bytes / 2**30:.1f} GiB of weights are too large for one ONNX file",
            hint="export a program: --to FILE.pt2",
        )
    with quiet():
        translated = _translate(traced)
        return write_whole(path, translated.save, lambda draft: _check(rebuilt, traced, draft))


def _translate(traced: Traced) -> Any:
    try:
        return torch.onnx.export(traced.program, dynamo=True, verbose=False)
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DistBeliefError(
            f"the model cannot be translated to ONNX: {first}",
            hint="export a program, which has all of torch's operations: --to FILE.pt2",
            details=str(error).strip(),
        ) from error


def _check(rebuilt: Rebuilt, traced: Traced, draft: Path) -> tuple[float | None, str]:
    import onnx

    try:
        onnx.checker.check_model(str(draft), full_check=True)
    except Exception as error:  # onnx has one class for faults of the model's form and another for its shapes
        raise DistBeliefError(f"onnx does not accept the translated model: {error}") from error
    if importlib.util.find_spec("onnxruntime") is None:
        return None, "accepted by onnx.checker; not run: onnxruntime is not installed"
    trials = traced.trials(rebuilt.inputs)
    try:
        difference = max(_compare(rebuilt, traced, trial, draft) for trial in trials)
    except _CannotRun as error:
        return None, f"accepted by onnx.checker; not run: {error}"
    return difference, f"accepted by onnx.checker; in onnxruntime {in_words(difference, [t.samples for t in trials])}"


class _CannotRun(Exception):
    """onnxruntime lacks a feature that this model needs on a CPU; the file may still be correct."""


def _compare(rebuilt: Rebuilt, traced: Traced, inputs: Inputs, draft: Path) -> float:
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    expected = rebuilt.answer(inputs)
    named = dict(zip(traced.program.graph_signature.user_inputs, inputs.leaves(), strict=True))
    try:
        session = onnxruntime.InferenceSession(draft, providers=["CPUExecutionProvider"])
        arrays = {wanted.name: named[wanted.name].numpy() for wanted in session.get_inputs()}
        found = [torch.from_numpy(array) for array in session.run(None, arrays)]
    except NoKernel as error:
        raise _CannotRun(f"onnxruntime has no {error}") from error
    except TypeError as error:  # numpy has no bfloat16
        raise _CannotRun(str(error)) from error
    except Exception as error:
        raise DistBeliefError(f"onnxruntime cannot run the translated model: {error}") from error
    return largest_difference(expected, found)


Format = Literal["safetensors", "program", "onnx"]


@dataclass(frozen=True)
class Exported:
    """The written file, and the result of its check; files are checked before they get their names."""

    to: str
    format: Format
    size_bytes: int
    tensors: int
    parameters: int
    """Numbers in floating tensors: parameters and running statistics; a tied tensor counts under each of its names."""
    checked: str
    max_difference: float | None
    """The largest difference between an output of the model and of the file; None if the file could not be run."""
    batch: int | None
    """The only batch size that the file accepts; None: any size, or the file has weights only."""


def export(source: Source, to: Path, form: Format, model_of: Path | None = None) -> Exported:
    """Write the source's weights to `to`, and replace an existing file.

    A program and ONNX need the model: the job of the run `model_of`, or else of the source, makes it again.
    """
    batch = None
    difference: float | None = 0.0
    if form == "safetensors":
        save_tensors(source.tensors, to)
        checked = "read back: every tensor has the same bits"
    else:
        if form == "onnx":
            require_onnx()
        run_dir = model_of or source.run_dir
        if run_dir is None:
            raise DistBeliefError(
                f"{source.path} holds weights only and does not say which model they are for",
                hint="export the run directory, or name the run that made such a model: --model-of RUN",
            )
        rebuilt = rebuild(run_dir, source.tensors, str(source.path))
        traced = trace(rebuilt)
        batch = None if traced.any_batch else rebuilt.inputs.samples
        difference, checked = (save_onnx if form == "onnx" else save_program)(rebuilt, traced, to)
    return Exported(
        to=str(to),
        format=form,
        size_bytes=to.stat().st_size,
        tensors=len(source.tensors),
        parameters=sum(t.numel() for t in source.tensors.values() if t.is_floating_point()),
        checked=checked,
        max_difference=difference,
        batch=batch,
    )
