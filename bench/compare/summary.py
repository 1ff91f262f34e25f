"""From the file of results to what tables, figures and the page show. Pure: the same file gives the same figures."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare.plan import ACCURACY_GOAL, ANY_GOAL, COMMUNICATION_GOAL, COMPUTE_GOAL, GOALS
from bench.compare.systems import DDP, DDP_ONEDNN, IDEAL, OURS, OURS_ONEDNN, SYSTEMS
from bench.spreads import Spread, spread
from bench.workloads import WORKLOADS

Content = Mapping[str, Any]
TURN_BASES = (DDP, IDEAL, DDP_ONEDNN)


@dataclass(frozen=True)
class Row:
    """One system in one cell."""

    system: str
    speed: Spread
    to_ddp: Spread | None
    """Its samples/s over DDP's, taken within repetitions; None where there is no common repetition."""
    to_ideal: Spread | None
    first_step_s: Spread
    peak_bytes: int
    wire_bytes_per_step: float | None
    others: Spread
    loss: float
    """The last one."""
    problem: str
    """Why it must not be compared; empty when it may."""

    @property
    def title(self) -> str:
        return title(self.system)

    @property
    def is_ours(self) -> bool:
        return kind(self.system) == "ours"


@dataclass(frozen=True)
class Verdict:
    """A goal that was set before anything was measured."""

    what: str
    found: float
    at_least: float

    @property
    def met(self) -> bool:
        return self.found >= self.at_least


def title(system: str) -> str:
    return SYSTEMS[system].title if system in SYSTEMS else system


def kind(system: str) -> str:
    return SYSTEMS[system].kind if system in SYSTEMS else "peer"


def cells(content: Content, part: str) -> list[tuple[str, int]]:
    """(workload, workers) of a part, in the order in which they were measured."""
    found = [(one["workload"], one["workers"]) for one in content["measurements"] if one["part"] == part]
    return list(dict.fromkeys(found))


def rows(content: Content, part: str, workload: str, workers: int) -> list[Row]:
    """The systems of a cell, fastest first; those that must not be compared last."""
    taken: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in content["measurements"]:
        if (one["part"], one["workload"], one["workers"]) == (part, workload, workers):
            taken.setdefault(one["system"], {})[one["repetition"]] = one
    found = [_row(name, some, taken.get(DDP, {}), taken.get(IDEAL, {})) for name, some in taken.items()]
    return sorted(found, key=lambda row: (bool(row.problem), -row.speed.median))


def _row(name: str, taken: Mapping[int, Mapping[str, Any]], ddp: Mapping[int, Any], ideal: Mapping[int, Any]) -> Row:
    measured = list(taken.values())
    wires = [one["wire_bytes_per_step"] for one in measured if one["wire_bytes_per_step"] is not None]
    problems = [one["problem"] for one in measured if one["problem"]]
    if _is_exact(name) and len({one["weights_sha256"] for one in measured}) > 1:
        problems.append("the weights differ between two repetitions of one job in exact mode")
    return Row(
        system=name,
        speed=spread([one["samples_per_s"] for one in measured]),
        to_ddp=_ratios(taken, ddp),
        to_ideal=_ratios(taken, ideal),
        first_step_s=spread([one["first_step_s"] for one in measured]),
        peak_bytes=max(one["peak_bytes"] for one in measured),
        wire_bytes_per_step=spread(wires).median if wires else None,
        others=spread([one["others"] for one in measured]),
        loss=measured[0]["losses"][-1],
        problem=problems[0] if problems else "",
    )


def _ratios(mine: Mapping[int, Any], theirs: Mapping[int, Any]) -> Spread | None:
    common = sorted(set(mine) & set(theirs))
    if not common:
        return None
    return spread([mine[number]["samples_per_s"] / theirs[number]["samples_per_s"] for number in common])


def _is_exact(name: str) -> bool:
    return kind(name) == "ours" and not SYSTEMS[name].asynchronous and name != "inexact"


def turns(content: Content, workload: str, base: str, ours: str = OURS) -> Spread | None:
    """Our allreduce's samples/s over another system's, round by round; None where they have taken no turns."""
    speeds = content.get("turns", {}).get(workload, {}).get("samples_per_s", {})
    pairs = zip(speeds.get(ours, ()), speeds.get(base, ()), strict=False)  # one may have ended in the last round
    ratios = [ours / others for ours, others in pairs if ours and others]
    return spread(ratios) if ratios else None


def turn_rows(content: Content) -> list[tuple[str, list[Spread | None]]]:
    """(workload and what is special about ours, its samples/s over those of `TURN_BASES`)"""
    found = []
    for workload, one in content.get("turns", {}).items():
        for ours in [name for name in one["samples_per_s"] if kind(name) == "ours"]:
            special = title(ours).removeprefix(title(OURS)).lstrip(":, ")
            name = f"{workload}, {special}" if special else workload
            bases = [base if ours == OURS_ONEDNN or base != DDP_ONEDNN else "" for base in TURN_BASES]
            found.append((name, [turns(content, workload, base, ours) for base in bases]))
    return found


def verdicts(content: Content) -> list[Verdict]:
    """Our allreduce with two workers against the goals of issues 2 and 8; with torch's own products, and with oneDNN's
    where those were measured."""
    found = []
    whole = {name: {row.system: row for row in rows(content, "speed", name, 2)} for name, _ in cells(content, "speed")}
    for workload in dict.fromkeys([*whole, *content.get("turns", {})]):
        for ours in (OURS, OURS_ONEDNN):
            row = whole.get(workload, {}).get(ours)
            if not (row and row.problem):
                found += _verdicts_of(content, workload, ours, row)
    first = first_steps(content)
    if OURS in first:
        others = {name: one for name, one in first.items() if kind(name) == "peer" and SYSTEMS[name].first_step}
        if others:
            name, soonest = min(others.items(), key=lambda item: item[1].median)
            quicker = soonest.median / first[OURS].median
            found.append(Verdict(f"first step: {title(name)}'s time (the soonest peer's) over ours", quicker, 1.0))
    return found


def _verdicts_of(content: Content, workload: str, ours: str, row: Row | None) -> Iterator[Verdict]:
    """`row`: of whole runs, which count where they have not taken turns."""
    name = f"{workload}, oneDNN" if ours == OURS_ONEDNN else workload
    over_ddp = max(
        GOALS.get(workload, {}).get(DDP, ANY_GOAL),
        COMMUNICATION_GOAL if WORKLOADS[workload].bound_by == "communication" else ANY_GOAL,
    )
    if to_ddp := turns(content, workload, DDP, ours) or (row and row.to_ddp):
        yield Verdict(f"{name}: samples/s over DDP's", to_ddp.median, over_ddp)
    if ours == OURS_ONEDNN:
        return  # the ideal multiplies with torch's own library: being faster than it says nothing
    over_ideal = GOALS.get(workload, {}).get(IDEAL, 0.0)
    if WORKLOADS[workload].bound_by == "compute":
        over_ideal = max(over_ideal, COMPUTE_GOAL)
    to_ideal = turns(content, workload, IDEAL, ours) or (row and row.to_ideal)
    if to_ideal and over_ideal:
        yield Verdict(f"{name}: samples/s over the ideal's", to_ideal.median, over_ideal)


def problems_of_ours(content: Content) -> list[str]:
    """What makes the program's exit status 1."""
    found = []
    for part in ("speed", "scaling", "accuracy"):
        for workload, workers in cells(content, part):
            some = rows(content, part, workload, workers)
            found += [
                f"{workload} ×{workers}: {row.title}: {row.problem}" for row in some if row.is_ours and row.problem
            ]
    for part, other in content["others"].items():
        if other.get("status") == 1:
            found += [f"{part}: {problem}" for problem in other.get("problems") or ["its program ended with 1"]]
    return found


def first_steps(content: Content) -> dict[str, Spread]:
    """System -> seconds to the first step, on the MLP (whatever there is, if there is no MLP)."""
    there = cells(content, "speed")
    if not there:
        return {}
    workload, workers = next((cell for cell in there if cell[0] == "mlp"), there[0])
    return {
        row.system: row.first_step_s
        for row in rows(content, "speed", workload, workers)
        if row.system not in SYSTEMS or SYSTEMS[row.system].first_step
    }


def scaling(content: Content, workload: str) -> dict[str, dict[int, Spread]]:
    """System -> workers -> samples/s."""
    found: dict[str, dict[int, Spread]] = {}
    for name, workers in cells(content, "scaling"):
        if name == workload:
            for row in rows(content, "scaling", name, workers):
                if not row.problem:
                    found.setdefault(row.system, {})[workers] = row.speed
    return found


def accuracy_curves(content: Content) -> dict[str, list[list[tuple[float, float]]]]:
    """System -> one curve per repetition: (seconds since the start, accuracy)."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for one in content["measurements"]:
        if one["part"] == "accuracy" and one["accuracy"] and not one["problem"]:
            found.setdefault(one["system"], []).append([(at, share) for at, share in one["accuracy"]])
    return found


def time_to_accuracy(curve: Sequence[tuple[float, float]], goal: float = ACCURACY_GOAL) -> float | None:
    """
    >>> time_to_accuracy([(1.0, 0.5), (2.0, 0.86), (3.0, 0.84)])
    2.0
    """
    return next((at for at, share in curve if share >= goal), None)


def lines_of_code(file: Path) -> int:
    """Lines with code on them: no blank ones, no comments, no docstrings."""
    tree = ast.parse(file.read_text())
    without = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            first = node.body[0]
            without |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(file.read_text().splitlines(), 1)
    return sum(
        1 for number, line in lines if number not in without and line.strip() and not line.strip().startswith("#")
    )
