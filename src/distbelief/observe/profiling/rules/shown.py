"""Formats the summary of a profile as lines for people and as data for programs."""

from __future__ import annotations

from typing import Any

from distbelief.observe import text
from distbelief.observe.profiling.rules.summary import Operator, Summary, WorkerTime

_LONGEST_NAME = 80


def lines(summary: Summary, trace: str = "", *, cpu: bool = False) -> list[str]:
    """`trace`: the trace file of the summary. `cpu`: show shares of the training threads' CPU time."""
    if not summary.workers:
        return ["the profile is empty", *summary.notes]
    first, end = summary.steps
    what = "CPU time" if cpu else "time"
    workers, step = text.count(len(summary.workers), "worker"), _time(max(one.step_s for one in summary.workers))
    found = [
        f"where the {what} went: steps {first} to {end - 1} of {workers}, {summary.strategy}, {step} a step",
        *_table(summary, cpu),
    ]
    if summary.slowest:
        found.append(
            f"the slowest: worker {summary.slowest.worker}, whose part of a step takes "
            f"{text.percent(summary.slowest.excess)} more time than that of the others"
        )
    for title, some in (("operators", summary.operators), ("kernels", summary.kernels)):
        if some:
            found.append(f"{title}, by their own time{_of(summary)}:")
            found += [f"  {_operator(one)}" for one in some]
    found += [f"note: {note}" for note in summary.notes]
    if trace:
        found.append(f"the trace: {trace} (open it in https://ui.perfetto.dev or chrome://tracing)")
    return found


def _of(summary: Summary) -> str:
    whole = sum(one.wall_s for one in summary.workers)
    covered = sum(one.operators_s for one in summary.workers)
    return "" if covered >= 0.95 * whole else f" (recorded in the first {_percent(covered / whole)} of these steps)"


def _table(summary: Summary, cpu: bool) -> list[str]:
    phases = summary.phases
    on_gpus = any(one.device_s for one in summary.workers)
    rows = [["", *phases, "CPU", *(["GPU"] if on_gpus else [])]]
    for one in summary.workers:
        of_device = [_percent(one.device_share)] if on_gpus else []
        rows.append([_title(one), *_shares(one, phases, cpu), _busy(one), *of_device])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _title(one: WorkerTime) -> str:
    return f"worker {one.worker}" + (f" ({one.place})" if one.place else "")


def _shares(one: WorkerTime, phases: list[str], cpu: bool) -> list[str]:
    spent = [one.phases[phase].cpu_s if cpu else one.phases[phase].seconds for phase in phases]
    whole = sum(each.cpu_s for each in one.phases.values()) if cpu else one.wall_s
    return [_percent(each / whole if whole else 0.0) for each in spent]


def _busy(one: WorkerTime) -> str:
    """The share of its time in which the training thread had a core."""
    return _percent(sum(spent.cpu_s for spent in one.phases.values()) / one.wall_s)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 or not share else f"{100 * share:.1f} %"


def _operator(one: Operator) -> str:
    calls = f"{one.calls_per_step:.0f}" if one.calls_per_step >= 9.95 else f"{one.calls_per_step:.1f}"
    took = f"{_time(one.seconds_per_step)} in {calls} calls a step and worker"
    return f"{_percent(one.share):>5}  {_name(one.name)}: {took}"


def _name(whole: str) -> str:
    """Shorten a kernel's name, which may be a page long because of template arguments.

    >>> _name("aten::mm"), len(_name("void at::native::vectorized_elementwise_kernel<4, " + 500 * "x"))
    ('aten::mm', 80)
    """
    name = whole.removeprefix("void ")
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _time(seconds: float) -> str:
    """
    >>> _time(0.0213), _time(2.5), _time(0.000034)
    ('21.3 ms', '2.50 s', '0.034 ms')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if seconds >= 0.001 else f"{seconds * 1000:.3f} ms"


def as_data(summary: Summary, trace: str = "") -> dict[str, Any]:
    """For `--json`: shares are of a worker's time, seconds are per step."""
    return {
        "trace": trace,
        "strategy": summary.strategy,
        "steps": list(summary.steps),
        "workers": [_worker(one) for one in summary.workers],
        "slowest": {"worker": summary.slowest.worker, "excess": summary.slowest.excess} if summary.slowest else None,
        "operators": [_operator_data(one) for one in summary.operators],
        "kernels": [_operator_data(one) for one in summary.kernels],
        "notes": list(summary.notes),
    }


def _worker(one: WorkerTime) -> dict[str, Any]:
    return {
        "worker": one.worker,
        "host": one.host,
        "place": one.place,
        "whole": one.is_whole,
        "steps": one.steps,
        "step_s": one.step_s,
        "wall_s": one.wall_s,
        "device_share": one.device_share,
        "phases": {
            phase: {
                "share": spent.seconds / one.wall_s,
                "s": spent.seconds / one.steps,
                "cpu_s": spent.cpu_s / one.steps,
            }
            for phase, spent in one.phases.items()
        },
    }


def _operator_data(one: Operator) -> dict[str, Any]:
    return {"name": one.name, "share": one.share, "s": one.seconds_per_step, "calls": one.calls_per_step}
