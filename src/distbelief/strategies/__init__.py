"""The table of strategies. A strategy is one folder, and one line here: its name, and the module with its value.

That module imports no torch. Its function `parse(text, options)` makes the value (a `Strategy`, see base.py) from a
string such as `ps:async:n_push=4`. Other distributions add strategies by an entry point of the group
`distbelief.strategies`: its name is the strategy's name, its value names such a module.
"""

from __future__ import annotations

import importlib
import platform
import re
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from distbelief.errors import JobError
from distbelief.strategies.base import Strategy

_OURS = "distbelief.strategies"
TABLE = {
    "allreduce": f"{_OURS}.dataparallel.strategy",
    "local_sgd": f"{_OURS}.localsgd.strategy",
    "ps": f"{_OURS}.ps.strategy",
    "sandblaster": f"{_OURS}.sandblaster.strategy",
    "pipeline": f"{_OURS}.mesh.strategy",
    "tensor": f"{_OURS}.mesh.strategy",
    "sharded": f"{_OURS}.mesh.strategy",
    "degrees": f"{_OURS}.mesh.strategy",
}
"""`degrees` stands for all names such as dp2.tp2.pp2. Our names take precedence over those of other distributions."""
KNOWN = (
    "allreduce, ps:sync, ps:async, ps:ssp:staleness=4, sandblaster, local_sgd:8, pipeline:4, tensor:2, sharded, "
    "or degrees such as dp2.tp2.pp2 and dp2.fsdp2"
)
GROUP = "distbelief.strategies"
"""The entry points of strategies that other distributions add."""
_DEGREE = re.compile(r"(dp|fsdp|tp|pp)\d*")


class UnknownStrategy(JobError):
    """No strategy of that name is installed on this host."""


@lru_cache(64)
def parse(text: str) -> Strategy:
    """Parse a strategy: its name, then options after colons.

    >>> parse("allreduce:inexact:gloo")
    AllReduce(exact=False, transport='gloo', compression='', always=False)
    >>> str(parse("ps:async")), parse("dp2.pp2").wish
    ('ps:async:servers=2', Wish(data=2, sharded=1, tensor=1, pipeline=2))
    """
    name, *options = text.split(":")
    module = _module(name)
    if module is None:
        known = ", ".join([*sorted(one.name for one in entry_points(group=GROUP)), KNOWN])
        raise UnknownStrategy(f"unknown strategy '{text}'", hint=f"known strategies: {known}")
    found = importlib.import_module(module).parse(text, options)
    assert isinstance(found, Strategy)
    return found


def plugin(text: str) -> str:
    """The distribution, with its version as pip writes it, that a host needs for this strategy; empty for our own
    strategies.

    >>> plugin("ps:async")
    ''
    """
    name = text.partition(":")[0]
    entry = _entry_point(name) if _our_module(name) is None else None
    return f"{entry.dist.name}=={entry.dist.version}" if entry and entry.dist else ""


def require(text: str, wanted: str) -> Strategy:
    """Parse a strategy on this host. `wanted`: the answer of `plugin` where the run was started.

    >>> require("vote", "distbelief-vote==1.0")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    distbelief.strategies.UnknownStrategy: ... has no strategy 'vote', which comes with the plug-in distbelief-vote==1.0
    """
    try:
        return parse(text)
    except UnknownStrategy:
        if not wanted:
            raise
        raise UnknownStrategy(
            f"the host {platform.node()} has no strategy '{text}', which comes with the plug-in {wanted}",
            hint=f"install it there: pip install {wanted}",
        ) from None


def _module(name: str) -> str | None:
    if ours := _our_module(name):
        return ours
    entry = _entry_point(name)
    return entry.module if entry else None


def _our_module(name: str) -> str | None:
    if "." in name or _DEGREE.fullmatch(name):
        return TABLE["degrees"]
    return TABLE.get(name) if name != "degrees" else None


def _entry_point(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=GROUP, name=name)), None)


def learn_alike(one: Strategy, other: Strategy) -> bool:
    """Whether both strategies learn the same, so that one can continue from the other's checkpoint.

    >>> learn_alike(parse("pipeline:2"), parse("allreduce")), learn_alike(parse("local_sgd:8"), parse("allreduce"))
    (True, False)
    >>> learn_alike(parse("local_sgd:8"), parse("local_sgd:8:gloo"))
    True
    """
    return one.learning == other.learning
