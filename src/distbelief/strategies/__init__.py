"""One file per strategy; `parse` reads a strategy's string form."""

from __future__ import annotations

from distbelief.errors import JobError
from distbelief.strategies.allreduce import AllReduce

NAMES = ("allreduce",)


def parse(text: str) -> AllReduce:
    """The strategy that a command line names: its name, then options after colons.

    >>> parse("allreduce:inexact:gloo")
    AllReduce(exact=False, transport='gloo')
    """
    name, *options = text.split(":")
    if name not in NAMES:
        raise JobError(f"unknown strategy '{text}'", hint=f"known strategies: {', '.join(NAMES)}")
    values: dict[str, object] = {}
    for option in options:
        if option == "inexact":
            values["exact"] = False
        elif option in ("auto", "shm", "gloo"):
            values["transport"] = option
        else:
            raise JobError(
                f"unknown option '{option}' in the strategy '{text}'",
                hint="options of allreduce: inexact, shm, gloo (as in allreduce:gloo)",
            )
    return AllReduce(**values)  # type: ignore[arg-type]
