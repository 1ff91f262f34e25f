"""Exports trained weights to a file for other programs: the tensors, a torch.export program, or ONNX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distbelief.checkpoint.sources import Source
from distbelief.checkpoint.weights import save_tensors
from distbelief.errors import DistBeliefError
from distbelief.exporting.onnxfile import require_onnx, save_onnx
from distbelief.exporting.program import save_program, trace
from distbelief.exporting.rebuilt import rebuild

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
