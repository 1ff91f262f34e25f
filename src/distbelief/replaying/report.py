"""Reports a replayed step: progress, a few lines and two tables for people, one object for programs."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from distbelief.errors import DistBeliefError, NonFiniteLoss
from distbelief.observe import text
from distbelief.replaying.findings import Count, Finding
from distbelief.replaying.inspection import Inspection, LayerView, ShardView
from distbelief.replaying.replay import Replayed

MOST_LAYERS = 40
MOST_INDICES = 8
SHARD_HEADINGS = ("shard", "samples", "loss", "gradient norm", "seed", "sample indices")
LAYER_HEADINGS = ("layer", "kind", "gradient norm", "not finite")


def as_json(found: Replayed) -> dict[str, Any]:
    """JSON has neither NaN nor infinity: null stands for them, and `finite` tells them apart."""
    seen = found.inspection
    return {
        "run_dir": str(found.asked.run_dir),
        "step": found.step,
        "shard": found.asked.shard,
        "from_checkpoint": found.start.checkpoint,
        "skipped": [{"step": step, "why": why} for step, why in found.start.skipped],
        "executed_again": found.step - found.began_at,
        "differs_from": found.differs_from,
        "fingerprint": found.result.fingerprint if found.result else None,
        "recorded": found.recorded,
        "verdict": found.verdict,
        "update": found.update,
        "exact": found.exact,
        "other_bits": found.other_bits or None,
        "failed_at": found.failure.step if found.failure else None,
        "failure": found.failure.message if found.failure else None,
        "error": found.error.message if found.error else None,
        "loss": text.finite(found.result.loss if found.result else seen.loss),
        "gradient_norm": text.finite(seen.gradient_norm),
        "clip_norm": found.clip_norm,
        "shards": [_shard(one) for one in seen.shards],
        "layers": [_layer(one) for one in seen.layers],
        "non_finite": [_finding(one) for one in seen.findings],
    }


def lines(found: Replayed) -> list[str]:
    seen = found.inspection
    told = [_heading(found), *_notes(found), *_verdicts(found), _numbers(found)]
    if found.error and not isinstance(found.error, NonFiniteLoss):
        told += ["", *_failed(seen, found.error)]
    if seen.findings:
        told += ["", *_not_finite(seen)]
    return [*told, "", *_shards(seen), "", *_layers(seen.layers)]


# --- the conclusion --------------------------------------------------------------------------------------------------


def _heading(found: Replayed) -> str:
    start = found.start
    source = "the values that the run began with"
    if start.checkpoint is not None:
        source = f"the checkpoint of step {start.checkpoint}"
    again = found.step - found.began_at
    way = f", through {text.count(again, 'step')}" if again else ""
    return f"step {found.step} of {found.asked.run_dir}, from {source}{way}"


def _notes(found: Replayed) -> list[str]:
    told = [f"skipped: the checkpoint of step {step}: {why}" for step, why in found.start.skipped]
    if found.other_bits:
        told.append(f"note: {found.other_bits}")
    if found.failure and found.failure.step != found.step:
        told.append(f"The run failed at step {found.failure.step}: {found.failure.message}")
        why = "the parameters were not finite by then, and this step made them so"
        told.append(f"Step {found.step} was replayed: {why if found.broke_state else 'here that step fails already'}.")
    elif found.failure:
        same = "here too" if found.error else "here it did not"
        told.append(f"The run failed at this step: {found.failure.message}; {same}.")
    return told


def _verdicts(found: Replayed) -> list[str]:
    here = found.result.fingerprint if found.result else ""
    if found.verdict == "matched":
        told = [f"matched, bit for bit: fingerprint {here}"]
    elif found.verdict == "differs" and found.exact:
        told = [f"differs: fingerprint {here} here, {found.recorded} in the run"]
    elif found.verdict == "differs":
        told = [f"differs: loss {found.recorded_loss!r} in the run, which is more than rounding explains"]
    elif found.verdict == "equal":
        told = [f"equal within rounding: loss {found.recorded_loss!r} in the run (it divided the model)"]
    elif not found.exact:
        told = ["unknown: the run was not exact, so its bits depended on its members"]
    elif found.recorded is None and found.committed:
        told = ["unknown: the run has left no fingerprint of this step (a run that fails may lose its last reports)"]
    elif found.recorded is None:
        told = ["unknown: the run has not committed this step, so it has no fingerprint"]
    else:
        told = ["unknown: the step could not be executed here"]
    if found.differs_from is not None:
        told.append(f"On the way, fingerprints differ from step {found.differs_from} on.")
    if not found.exact:
        return told
    meaning = {
        "matched": "matched (the next step of the run shows it)",
        "differs": "differs (the next step of the run was another)",
        "unknown": "unknown (no later step of the run shows it)",
    }
    return [*told, f"update: {meaning[found.update]}"]


def _numbers(found: Replayed) -> str:
    seen = found.inspection
    of = "" if found.asked.shard is None else f" of shard {found.asked.shard}"
    loss = found.result.loss if found.result and found.asked.shard is None else seen.loss
    parts = [f"loss{of} {text.number(loss)}", f"gradient norm{of} {text.number(seen.gradient_norm)}"]
    norm = seen.gradient_norm
    if found.clip_norm is not None and norm is not None and norm > found.clip_norm and found.asked.shard is None:
        parts[-1] += f" (clipped to {found.clip_norm:g})"
    return ", ".join([*parts, text.count(sum(len(one.indices) for one in seen.shards), "sample")])


def _failed(seen: Inspection, error: DistBeliefError) -> list[str]:
    where = next((one for one in seen.shards if one.error), None)
    inside = f", in the layer {where.error_layer}" if where and where.error_layer else ""
    first = f"Shard {where.shard}{inside}" if where else "The step cannot be executed"
    return [f"{first}: {error.message}", *textwrap.indent(error.details.rstrip("\n"), "    ").splitlines()]


# --- values that are not finite --------------------------------------------------------------------------------------


def _not_finite(seen: Inspection) -> list[str]:
    harmless = all(one.finite for one in seen.shards)
    told = ["Not finite on the way, although loss and gradients are:" if harmless else "Not finite:"]
    told += [
        f"  before the step: {one.where} {one.name} has {_count(one.count)}"
        for one in seen.findings
        if one.shard is None
    ]
    for shard in sorted({one.shard for one in seen.findings if one.shard is not None}):
        mine = [one for one in seen.findings if one.shard == shard]
        told += [f"  shard {shard}: {_origin(one)}" for one in mine if one.origin]
        later = [one.layer for one in mine if not one.origin]
        if later:
            shown = ", ".join(later[:MOST_INDICES]) + (", …" if len(later) > MOST_INDICES else "")
            told.append(f"  shard {shard}: {'and then' if len(later) < len(mine) else 'in'} {shown}")
    return told


def _origin(one: Finding) -> str:
    samples = f" (sample{'s' * (len(one.samples) > 1)} {_listed(one.samples)})" if one.samples else ""
    match one.where:
        case "batch":
            return f"the samples themselves: batch{one.name} has {_count(one.count)}{samples}"
        case "output":
            return f"first in the layer {one.layer}: {_count(one.count)} in its output{samples}, none in its input"
        case "gradient":
            return f"first in the backward pass of the layer {one.layer} ({one.name}): {_count(one.count)}"
    return f"first in the loss function: {_count(one.count)}; the model's output is finite"


def _count(count: Count) -> str:
    """
    >>> _count(Count(2, 0)), _count(Count(1, 3))
    ('2 NaN', '1 NaN and 3 infinite')
    """
    named = [(count.nan, "NaN"), (count.infinite, "infinite")]
    return " and ".join(f"{number:,} {name}" for number, name in named if number)


# --- tables ----------------------------------------------------------------------------------------------------------


def _shards(seen: Inspection) -> list[str]:
    rows = [
        (
            str(one.shard),
            str(len(one.indices)),
            text.number(one.loss),
            text.number(one.gradient_norm),
            str(one.seed),
            _listed(one.indices),
        )
        for one in seen.shards
    ]
    return _table([SHARD_HEADINGS, *rows], left={5})


def _layers(layers: Sequence[LayerView]) -> list[str]:
    """Rows in the model's order. Of many layers, only layers that are not finite and layers with the largest
    gradients."""
    ranked = sorted(layers, key=lambda one: (not one.count, -(one.gradient_norm or 0.0)))[:MOST_LAYERS]
    rows = [
        (one.layer, one.kind, text.number(one.gradient_norm), _count(one.count) or "–")
        for one in layers
        if any(one is shown for shown in ranked)
    ]
    rest = len(layers) - len(rows)
    more = [f"and {rest} with smaller gradients (--json has them all)"] if rest else []
    return [*_table([LAYER_HEADINGS, *rows], left={0, 1}), *more]


def _table(rows: Sequence[Sequence[str]], left: Iterable[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = set(left)
    return [
        "  ".join(
            cell.ljust(width) if column in aligned else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _listed(indices: Sequence[int]) -> str:
    """
    >>> _listed([4, 7]), _listed(range(20))
    ('4, 7', '0, 1, 2, 3, 4, 5, 6, 7, … (20)')
    """
    shown = ", ".join(map(str, indices[:MOST_INDICES]))
    return shown if len(indices) <= MOST_INDICES else f"{shown}, … ({len(indices)})"


# --- JSON ------------------------------------------------------------------------------------------------------------


def _shard(one: ShardView) -> dict[str, Any]:
    return {
        "shard": one.shard,
        "samples": len(one.indices),
        "loss": text.finite(one.loss),
        "gradient_norm": text.finite(one.gradient_norm),
        "finite": one.finite,
        "seed": one.seed,
        "indices": list(one.indices),
        "error": _message(one.error) if one.error else None,
        "error_layer": one.error_layer or None,
    }


def _layer(one: LayerView) -> dict[str, Any]:
    return {
        "layer": one.layer,
        "kind": one.kind,
        "gradient_norm": text.finite(one.gradient_norm),
        "non_finite": one.count.nan + one.count.infinite,
        "parameters": [
            {
                "name": part.name,
                "gradient_norm": text.finite(part.gradient_norm),
                "non_finite": part.count.nan + part.count.infinite,
            }
            for part in one.parameters
        ],
    }


def _finding(one: Finding) -> dict[str, Any]:
    return {
        "where": one.where,
        "layer": one.layer,
        "name": one.name or None,
        "shard": one.shard,
        "nan": one.count.nan,
        "infinite": one.count.infinite,
        "origin": one.origin,
        "samples": list(one.samples),
    }


def _message(error: Exception) -> str:
    return error.message if isinstance(error, DistBeliefError) else f"{type(error).__name__}: {error}"


# --- progress -----------------------------------------------------------------------------------------------------

EVERY_S = 2.0
EVERY_ON_TERMINAL_S = 0.1


class WayShown:
    """Shows the progress on the way; called after every step. Prints nothing if the way is short."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._moving = stream.isatty()
        self._every_s = EVERY_ON_TERMINAL_S if self._moving else EVERY_S
        self._shown_at: float | None = None
        self._shown = False

    def __call__(self, began_at: int, applied: int, target: int) -> None:
        now = self._clock()
        if self._shown_at is None:
            self._shown_at = now
        elif now - self._shown_at >= self._every_s and applied < target:
            self._shown_at = now
            done = f"{applied - began_at:,} of {target - began_at:,} done"
            self._write(f"executing steps {began_at} … {target - 1} again: {done}")

    def close(self) -> None:
        if self._shown and self._moving:
            self._shown = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _write(self, line: str) -> None:
        self._shown = True
        self._stream.write(f"\r\x1b[K{line}" if self._moving else f"{line}\n")
        self._stream.flush()
