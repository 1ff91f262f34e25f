"""Writes a traced model as an ONNX file. onnx checks the file; onnxruntime, where installed, runs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from distbelief.atomicfile import write_whole
from distbelief.errors import DistBeliefError
from distbelief.exporting.agreement import in_words, largest_difference
from distbelief.exporting.program import Traced, quiet
from distbelief.exporting.rebuilt import Inputs, Rebuilt

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
