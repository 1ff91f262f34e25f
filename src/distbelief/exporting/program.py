"""Exports a model as a torch.export program: traced on a few samples, saved, loaded again and compared."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection

from distbelief.atomicfile import write_whole
from distbelief.errors import DistBeliefError
from distbelief.exporting.agreement import in_words, largest_difference
from distbelief.exporting.rebuilt import Inputs, Rebuilt


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
