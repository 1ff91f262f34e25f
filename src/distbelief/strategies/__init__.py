"""The table of strategies. A strategy is one folder, and one line here: its name, and the module with its value.

That module imports no torch. Its function `parse(text, options)` makes the value (a `Strategy`, see base.py) from a
string such as `ps:async:n_push=4`. Other distributions add strategies by an entry point of the group
`distbelief.strategies`: its name is the strategy's name, its value names such a module. A plug-in that cannot be used
raises a JobError that names the entry point and its distribution.
"""

from __future__ import annotations

import importlib
import platform
import re
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from distbelief.errors import DistBeliefError, JobError
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
"""`degrees` stands for all names such as dp2.tp2.pp2. No other distribution may use one of our names."""
KNOWN = (
    "allreduce, ps:sync, ps:async, ps:ssp:staleness=4, sandblaster, local_sgd:8, pipeline:4, tensor:2, sharded, "
    "or degrees such as dp2.tp2.pp2 and dp2.fsdp2"
)
GROUP = "distbelief.strategies"
"""The entry points of strategies that other distributions add."""
_DEGREE = re.compile(r"(dp|fsdp|tp|pp)\d*")
_MODULE = re.compile(r"\w+(\.\w+)*")
_IMPORT_FRAMES = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")


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
    ours, entry = _our_module(name), _entry_point(name)
    if ours is None and entry is None:
        known = ", ".join([*sorted({one.name for one in entry_points(group=GROUP)}), KNOWN])
        raise UnknownStrategy(f"unknown strategy '{text}'", hint=f"known strategies: {known}")
    if ours is not None and entry is not None:
        raise JobError(
            f"{_called(entry)} has the name of a strategy of DistBelief's own",
            hint="give the entry point another name, or uninstall the distribution",
        )
    if entry is not None:
        return _parsed_by(entry, text, options)
    assert ours is not None
    found = importlib.import_module(ours).parse(text, options)
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
    return _distribution(entry) if entry else ""


def import_sides(text: str) -> None:
    """Import what workers of this strategy run, and what its servers run, if it has any. Both import torch."""
    how = parse(text)
    name = text.partition(":")[0]
    entry = _entry_point(name) if _our_module(name) is None else None
    for module, function in {how.on_workers: "prepare", **({how.on_servers: "serve"} if how.servers else {})}.items():
        if entry is None:
            importlib.import_module(module)
        elif not callable(getattr(_imported(entry, module), function, None)):
            raise JobError(
                f"{_called(entry)} cannot be used: its module {module} has no function {function}",
                hint="distbelief.strategies.base.Strategy says what on_workers and on_servers must name",
            )


def require(text: str, wanted: str, host: str = "") -> Strategy:
    """Parse a strategy on this host. `wanted`: the answer of `plugin` where the run was started. `host`: this machine's
    name in the run; empty: its own name.

    >>> require("vote", "distbelief-vote==1.0", "node7")
    Traceback (most recent call last):
        ...
    distbelief.strategies.UnknownStrategy: the host node7 has no strategy 'vote', which comes with the plug-in \
distbelief-vote==1.0
    """
    try:
        return parse(text)
    except UnknownStrategy:
        if not wanted:
            raise
        raise UnknownStrategy(
            f"the host {host or platform.node()} has no strategy '{text}', which comes with the plug-in {wanted}",
            hint=f"install it there: pip install {wanted}",
        ) from None


def _our_module(name: str) -> str | None:
    if "." in name or _DEGREE.fullmatch(name):
        return TABLE["degrees"]
    return TABLE.get(name) if name != "degrees" else None


# --- plug-ins --------------------------------------------------------------------------------------------------------


@lru_cache(64)
def _entry_point(name: str) -> EntryPoint | None:
    """The entry point of that name, if a distribution has one. Cached: workers put the run's folders in front of
    sys.path, where another version of the plug-in may be, after the plug-in was imported."""
    found = sorted(entry_points(group=GROUP, name=name), key=_distribution)
    if len({(entry.value, _distribution(entry)) for entry in found}) > 1:
        who = " and ".join(f"{_distribution(entry)} ({entry.name} = {entry.value})" for entry in found)
        raise JobError(
            f"several entry points of the group {GROUP} have the name '{name}': {who}",
            hint="uninstall all of these distributions but one",
        )
    return found[0] if found else None


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name}=={entry.dist.version}" if entry.dist else ""


def _called(entry: EntryPoint) -> str:
    of = f" of {_distribution(entry)}" if entry.dist else ""
    return f"the entry point '{entry.name} = {entry.value}'{of} (group {GROUP})"


def _parsed_by(entry: EntryPoint, text: str, options: Sequence[str]) -> Strategy:
    """The value that a plug-in's parser makes."""
    parser = _parser(entry)
    try:
        found = parser(text, options)
    except DistBeliefError:
        raise
    except Exception as error:
        raise _raised(entry, "its parse(text, options) raised", error) from error
    if not isinstance(found, Strategy):
        raise JobError(
            f"{_called(entry)} cannot be used: its parse(text, options) returned a value of the type "
            f"{type(found).__name__}, not a Strategy",
            hint="derive the value's class from distbelief.strategies.base.Strategy",
        )
    again = str(found)  # how launch.json, workers and the journal name the strategy
    other = _entry_point(again.partition(":")[0])
    if other is None or other.value != entry.value:
        raise JobError(
            f"{_called(entry)} cannot be used: the string form of its value, '{again}', is none that it can parse",
            hint=f"give the value's class a __str__ that returns its command-line form, as in '{text}'",
        )
    return found


def _parser(entry: EntryPoint) -> Callable[[str, Sequence[str]], object]:
    if not _MODULE.fullmatch(entry.value):
        raise JobError(
            f"{_called(entry)} cannot be used: its value is not the name of a module",
            hint="name the module that has parse(text, options), as in 'vote = vote.strategy'",
        )
    module = _imported(entry, entry.value)
    parser: object = getattr(module, "parse", None)
    if not callable(parser):
        raise JobError(
            f"{_called(entry)} cannot be used: its module has no function parse(text, options)",
            hint="the parser makes the strategy's value from its string form, see CONTRIBUTING.md",
        )
    return parser


def _imported(entry: EntryPoint, name: str) -> ModuleType:
    """A module of a plug-in."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _raised(entry, f"its module {name} raised on import", error) from error
        raise JobError(
            f"{_called(entry)} cannot be used: there is no module '{error.name}'",
            hint="install the distribution again, or mend its entry point",
        ) from error
    except Exception as error:
        raise _raised(entry, f"its module {name} raised on import", error) from error


def _raised(entry: EntryPoint, what: str, error: Exception) -> JobError:
    """With the plug-in's own frames of the traceback."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename in (__file__, importlib.__file__, *_IMPORT_FRAMES):
        frame = frame.tb_next
    details = "".join(traceback.format_exception(type(error), error, frame))
    return JobError(
        f"{_called(entry)} cannot be used: {what} {type(error).__name__}: {error}",
        hint="the traceback shows where in the plug-in's code it happened",
        details=details,
    )


def learn_alike(one: Strategy, other: Strategy) -> bool:
    """Whether both strategies learn the same, so that one can continue from the other's checkpoint.

    >>> learn_alike(parse("pipeline:2"), parse("allreduce")), learn_alike(parse("local_sgd:8"), parse("allreduce"))
    (True, False)
    >>> learn_alike(parse("local_sgd:8"), parse("local_sgd:8:gloo"))
    True
    """
    return one.learning == other.learning
