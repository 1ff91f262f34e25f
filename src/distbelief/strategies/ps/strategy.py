"""The strategy `ps`: servers own the parameters and apply the updates; workers push gradients and pull parameters.

This module has the value and its parser, without torch, for the command line and the coordinator. The options are in
rules/options.py; the package's docstring explains how it all works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from distbelief.compression.option import NAMES as COMPRESSIONS
from distbelief.compression.option import add_compression
from distbelief.errors import JobError
from distbelief.instrument import Instrument
from distbelief.strategies.base import Strategy
from distbelief.strategies.dataparallel.strategy import REPLICA_UPDATE
from distbelief.strategies.ps.rules.options import ASYNCHRONOUS, MODES, ParameterServerOptions

SERVER_WAITS = (
    Instrument("wait", "distbelief.strategies.ps.worker.exchange", "DeviceServerExchange", ("bring",)),
    Instrument("wait", "distbelief.strategies.ps.protocol.client", "ServerClient", ("_wait", "nap")),
)
"""The functions in which a worker of any strategy with parameter servers waits."""


@dataclass(frozen=True)
class ParameterServer(ParameterServerOptions, Strategy):
    """`sync`: all shards of a step are added before it is applied, so the weights are those of allreduce, bit for bit.
    `async`: every worker computes batches of its own, and nobody waits (Downpour SGD). `ssp`: likewise, but no update
    is computed with parameters that miss more than `staleness` others.

    Every slice of the parameters has a primary and a backup, on two servers. With one server there is no backup.

    >>> str(ParameterServer(2)), str(ParameterServer(1, "ssp", staleness=4, over="tcp"))
    ('ps:sync:servers=2', 'ps:ssp:servers=1:staleness=4:tcp')
    """

    on_workers: ClassVar[str] = "distbelief.strategies.ps.worker.prepared"
    keeps_freed_memory: ClassVar[bool] = True
    pace_names: ClassVar[tuple[str, ...]] = ("n_push", "n_fetch")
    on_servers: ClassVar[str] = "distbelief.strategies.ps.server.runslices"
    instruments: ClassVar[tuple[Instrument, ...]] = (
        Instrument("reduce", "distbelief.strategies.ps.worker.synchronous", "SynchronousReplica", ("_push", "_bring")),
        Instrument("reduce", "distbelief.strategies.ps.worker.asynchronous", "AsynchronousReplica", ("_push", "fetch")),
        Instrument("wait", "distbelief.strategies.ps.worker.asynctraining", "", ("_nap",)),
        REPLICA_UPDATE,
        *SERVER_WAITS,
    )

    @property
    def exact(self) -> bool:
        return self.mode == "sync" and not self.compression

    @property
    def rechecks(self) -> bool:
        """Not with backup workers, which do not wait for a late member."""
        return self.exact and not self.backups

    @property
    def not_rechecked(self) -> str:
        return "the sums and updates on the servers"

    @property
    def transport(self) -> Literal["auto", "shm", "gloo"]:
        """The transport between workers. If it uses the network, servers are reached over the network too."""
        return "gloo" if self.over == "tcp" else self.over

    def pace_text(self, pace: Sequence[int]) -> str:
        pushes, fetches = _many(pace[0], "batch", "batches"), _many(pace[1], "update", "updates")
        return f"pushes every {pushes} and fetches every {fetches}"

    def __str__(self) -> str:
        text = f"ps:{self.mode}:servers={self.servers}"
        if self.backups:
            text += f":backups={self.backups}"
        if self.staleness is not None:
            text += f":staleness={self.staleness}"
        for name, usual in ASYNCHRONOUS.items():
            if (value := getattr(self, name)) != usual:
                text += f":{name}" if value is True else f":{name}={value}"
        if self.compression:
            text += f":{self.compression}" + (":always" if self.always else "")
        return text + (f":{self.over}" if self.over != "auto" else "")


def parse(text: str, options: Sequence[str]) -> ParameterServer:
    """Parse the strategy's string form.

    >>> parse("ps:ssp:staleness=4", ["ssp", "staleness=4"]) == ParameterServer(mode="ssp", staleness=4)
    True
    """
    values: dict[str, Any] = {}
    for option in options:
        key, _, number = option.partition("=")
        if option in MODES:
            values["mode"] = option
        elif option in ("adaptive", "always"):
            values[option] = True
        elif key in COMPRESSIONS:
            add_compression(values, option, text)
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


def _many(count: int, one: str, more: str) -> str:
    return one if count == 1 else f"{count} {more}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
