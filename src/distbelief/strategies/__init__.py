"""One file per strategy; `parse` reads a strategy's string form."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from distbelief.compression.option import NAMES as COMPRESSIONS
from distbelief.errors import JobError
from distbelief.strategies.base import Strategy
from distbelief.strategies.dataparallel.strategy import AllReduce
from distbelief.strategies.localsgd.strategy import parse_local_sgd
from distbelief.strategies.mesh.strategy import (
    SCHEDULES,
    Hybrid,
    Pipeline,
    Sharded,
    Tensor,
    no_gradients_travel,
)
from distbelief.strategies.ps.strategy import MODES, ParameterServer
from distbelief.strategies.sandblaster.strategy import parse_sandblaster

KNOWN = (
    "allreduce, ps:sync, ps:async, ps:ssp:staleness=4, sandblaster, local_sgd:8, pipeline:4, tensor:2, sharded, "
    "or degrees such as dp2.tp2.pp2 and dp2.fsdp2"
)
_DEGREES = {"dp": "data", "fsdp": "sharded", "tp": "tensor", "pp": "pipeline"}
_PART = re.compile(r"([a-z]+)(\d*)")


@lru_cache(64)
def parse(text: str) -> Strategy:
    """The strategy that a command line names: its name, then options after colons.

    >>> parse("allreduce:inexact:gloo")
    AllReduce(exact=False, transport='gloo', compression='', always=False)
    >>> str(parse("allreduce:topk=0.01:gloo"))
    'allreduce:topk=0.01'
    >>> parse("pipeline:4:zbv")
    Pipeline(stages=4, schedule='zbv', snapshots=None)
    >>> parse("dp2.tp2.pp2:snapshots=50")
    Hybrid(data=2, tensor=2, pipeline=2, sharded=1, schedule='1f1b', snapshots=50, compression='', always=False)
    """
    name, *options = text.split(":")
    if name == "allreduce":
        return _allreduce(text, options)
    if name == "ps":
        return _parameter_server(text, options)
    if name == "sandblaster":
        return parse_sandblaster(text, options)
    if name == "local_sgd":
        return parse_local_sgd(text, options)
    if name == "pipeline":
        stages, rest = _degree(text, options)
        return Pipeline(stages, **_uncompressed(text, _options(text, rest, scheduled=True)))
    if name == "tensor":
        degree, rest = _degree(text, options)
        return Tensor(degree, **_uncompressed(text, _options(text, rest, scheduled=False)))
    if name == "sharded":
        if options and options[0].isdigit():
            raise JobError(
                f"the strategy '{text}' gives sharded a degree, but it divides the model among all workers",
                hint=f"groups of {options[0]} workers that divide it are fsdp{options[0]}",
            )
        return Sharded(**_uncompressed(text, _options(text, options, scheduled=False)))
    degrees = _degrees(text, name)
    return Hybrid(**degrees, **_options(text, options, scheduled=degrees.get("pipeline", 1) > 1))


def learn_alike(one: Strategy, other: Strategy) -> bool:
    """Whether both should come to the same weights, so that one can go on from a checkpoint of the other.

    >>> learn_alike(parse("pipeline:2"), parse("allreduce")), learn_alike(parse("local_sgd:8"), parse("allreduce"))
    (True, False)
    >>> learn_alike(parse("local_sgd:8"), parse("local_sgd:8:gloo"))
    True
    """
    return one.learning == other.learning


def _allreduce(text: str, options: Sequence[str]) -> AllReduce:
    values: dict[str, Any] = {}
    for option in options:
        if option == "inexact":
            values["exact"] = False
        elif option in ("auto", "shm", "gloo", "nccl"):
            values["transport"] = option
        elif option == "always":
            values["always"] = True
        elif option.partition("=")[0] in COMPRESSIONS:
            if "compression" in values:
                raise JobError(f"the strategy '{text}' gives its compression twice", hint="give it once")
            values["compression"] = option
        else:
            raise JobError(
                f"unknown option '{option}' in the strategy '{text}'",
                hint="options of allreduce: inexact, shm, gloo (as in allreduce:gloo); a compression: bf16, int8, "
                "topk=0.01 or powersgd=4, and with it always",
            )
    return AllReduce(**values)


def _parameter_server(text: str, options: Sequence[str]) -> ParameterServer:
    values: dict[str, Any] = {}
    for option in options:
        key, _, number = option.partition("=")
        if option in MODES:
            values["mode"] = option
        elif option in ("adaptive", "always"):
            values[option] = True
        elif key in COMPRESSIONS:
            if "compression" in values:
                raise JobError(f"the strategy '{text}' gives its compression twice", hint="give it once")
            values["compression"] = option
        elif key in ("noise", "dc") and _is_number(number):
            values[key] = float(number)
        elif option in ("auto", "shm", "tcp"):
            values["over"] = option
        elif key in ("servers", "backups", "staleness", "n_push", "n_fetch", "warm_up") and number.isdigit():
            values[key] = int(number)
        else:
            raise JobError(
                f"unknown option '{option}' in the strategy '{text}'",
                hint="options of ps: sync, ssp, async, servers=2, backups=1 (of sync), staleness=4 (of ssp), "
                "n_push=1, n_fetch=1, adaptive, warm_up=0, noise=0, dc=0, shm, tcp (as in ps:sync:servers=2 and "
                "ps:async:n_push=4); a compression: bf16, int8 or topk=0.01, and with it always",
            )
    return ParameterServer(**values)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _degree(text: str, options: Sequence[str]) -> tuple[int, Sequence[str]]:
    name = text.partition(":")[0]
    if not options or not options[0].isdigit():
        raise JobError(f"the strategy '{text}' needs a degree", hint=f"write it after a colon, as in {name}:2")
    return _positive(text, options[0]), options[1:]


def _degrees(text: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in name.split("."):
        match = _PART.fullmatch(part)
        if match is None or match[1] not in _DEGREES:
            if not found and "." not in name:
                raise JobError(f"unknown strategy '{text}'", hint=f"known strategies: {KNOWN}")
            raise JobError(
                f"'{part}' in the strategy '{text}' is no degree",
                hint="degrees are dp (data), fsdp (sharded), tp (tensor) and pp (pipeline), as in dp2.tp2.pp2",
            )
        if not match[2]:
            raise JobError(f"'{part}' in the strategy '{text}' needs a number", hint=f"for example {part}2")
        if _DEGREES[match[1]] in found:
            raise JobError(f"{match[1]} is there twice in the strategy '{text}'", hint="give each degree once")
        found[_DEGREES[match[1]]] = _positive(text, match[2])
    return found


def _positive(text: str, number: str) -> int:
    if not int(number):
        raise JobError(f"a degree in the strategy '{text}' is 0", hint="a degree is at least 1; 1 divides nothing")
    return int(number)


def _uncompressed(text: str, values: dict[str, Any]) -> dict[str, Any]:
    if values.keys() & {"compression", "always"}:
        raise no_gradients_travel(text)
    return values


def _options(text: str, options: Sequence[str], *, scheduled: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in options:
        key, equals, number = option.partition("=")
        name: str
        value: str | int
        if key == "snapshots" and equals and number.isdigit():
            name, value = "snapshots", int(number)
        elif key == "snapshots":
            raise JobError(
                f"'{option}' in the strategy '{text}' is not of the form snapshots=50",
                hint="the number is that of steps between two snapshots; 0 takes none",
            )
        elif key in COMPRESSIONS:
            name, value = "compression", option
        elif option == "always":
            name, value = "always", True
        elif option in SCHEDULES and scheduled:
            name, value = "schedule", option
        elif option in SCHEDULES:
            raise JobError(f"the schedule {option} is for pipelines, and the strategy '{text}' has none")
        else:
            schedules = f"{', '.join(SCHEDULES)}, " if scheduled else ""
            raise JobError(
                f"unknown option '{option}' in the strategy '{text}'",
                hint=f"options: {schedules}snapshots=STEPS; with dp2 and more a compression (bf16, int8, topk=0.01) "
                "and always",
            )
        if name in values:
            raise JobError(f"the strategy '{text}' gives its {name} twice", hint="give it once")
        values[name] = value
    return values
