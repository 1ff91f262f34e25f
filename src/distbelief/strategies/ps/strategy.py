"""ps: servers own the parameters and apply the updates; workers compute gradients, push them and fetch parameters.

The value alone, without torch, which the command line and the coordinator need not import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from distbelief.compression.option import NAMES as COMPRESSIONS
from distbelief.compression.option import canonical
from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies.base import Strategy

if TYPE_CHECKING:
    import torch

    from distbelief.strategies.base import ServerHost
    from distbelief.strategies.ps.worker.prepared import PreparedParameterServer

MODES = ("sync", "ssp", "async")
FREE = {"adaptive": False, "n_push": 1, "n_fetch": 1, "warm_up": 0, "noise": 0.0, "dc": 0.0}
"""Options of the modes in which nobody waits, and what they are if they are not given."""


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """`sync`: all shards of a step are added before it is applied, so the weights are those of allreduce, bit for bit.
    `async`: every worker computes batches of its own, and nobody waits (Downpour SGD). `ssp`: likewise, but no update
    is computed with parameters that miss more than `staleness` others.

    Every slice of the parameters has a primary and a backup, on two servers. With one server there is no backup.

    >>> str(ParameterServer(2)), str(ParameterServer(1, "ssp", staleness=4, over="tcp"))
    ('ps:sync:servers=2', 'ps:ssp:servers=1:staleness=4:tcp')
    """

    servers: int = 2
    mode: Literal["sync", "ssp", "async"] = "sync"
    backups: int = 0
    """sync: of so many late workers at a time the missing shards are computed by others, too; the first copy counts."""
    staleness: int | None = None
    """ssp: the most updates that others may have made to parameters while one was computed with them."""
    n_push: int = 1
    """Batches whose gradients are pushed together."""
    n_fetch: int = 1
    """Updates of a worker from one fetch of the parameters to the next."""
    adaptive: bool = False
    """n_push and n_fetch are chosen by each worker, from what it measures."""
    warm_up: int = 0
    """So many updates are computed one after the other, before several workers begin (a warm start)."""
    noise: float = 0.0
    """The standard deviation of Gaussian noise that is added to every pushed gradient."""
    dc: float = 0.0
    """Delay compensation: how strongly a late gradient is corrected for what the parameters have moved meanwhile."""
    compression: str = ""
    """How pushed gradients are made smaller on their way: bf16, int8 or topk=0.01."""
    always: bool = False
    """Compression is never switched off by itself, in shared memory or where the link is faster than the compressor."""
    over: Literal["auto", "shm", "tcp"] = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise JobError(f"unknown mode '{self.mode}' of parameter servers", hint=f"known: {', '.join(MODES)}")
        for name, least in (("servers", 1), ("backups", 0), ("n_push", 1), ("n_fetch", 1), ("warm_up", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise JobError(
                    f"{name} of parameter servers must be at least {least}, not {value!r}",
                    hint="as in ps:sync:servers=2; with one server there is no backup" if name == "servers" else "",
                )
        if self.over not in ("auto", "shm", "tcp"):
            raise JobError(f"unknown transport '{self.over}'", hint="use auto, shm (one host) or tcp")
        for name in ("noise", "dc"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise JobError(f"{name} of parameter servers must be 0 or more, not {getattr(self, name)}")
        if (self.mode == "ssp") != (self.staleness is not None):
            raise JobError(
                "ssp needs a bound on staleness, and the other modes have none", hint="for example ps:ssp:staleness=4"
            )
        if self.staleness is not None and self.staleness < 0:
            raise JobError(f"staleness must be 0 or more, not {self.staleness}")
        self._check_compression()
        if self.backups and self.mode != "sync":
            raise JobError(
                "backups are for sync", hint=f"nobody waits for late workers in ps:{self.mode}: leave them out"
            )
        if self.adaptive and (self.n_push, self.n_fetch) != (1, 1):
            raise JobError("adaptive chooses n_push and n_fetch itself", hint="leave these out, or adaptive")
        if self.mode == "sync" and any(getattr(self, name) != usual for name, usual in FREE.items()):
            names = ", ".join(FREE)
            raise JobError(f"{names} are for async and ssp", hint="leave them out of ps:sync")

    def _check_compression(self) -> None:
        if not self.compression:
            if self.always:
                raise JobError("always is for compression, and there is none", hint="for example ps:async:int8:always")
            return
        object.__setattr__(self, "compression", canonical(self.compression))
        if self.compression.startswith("powersgd"):
            raise JobError(
                "powersgd cannot compress what is pushed to servers",
                hint="it sums matrices over all workers: use allreduce:powersgd=4, or bf16, int8 or topk=0.01 here",
            )
        if self.backups:
            raise JobError(
                f"with {self.compression} a shard gives something else to everybody who computes it, so there are no "
                "backup copies of late ones",
                hint=f"leave out backups or {self.compression}",
            )
        if self.over == "shm" and not self.always:
            raise JobError(
                f"in shared memory there is nothing to compress with {self.compression}",
                hint="leave shm out, or use tcp",
            )
        if self.dc:
            raise JobError(
                "delay compensation sends the parameters along, which are not compressed",
                hint=f"leave out dc or {self.compression}",
            )

    @property
    def exact(self) -> bool:
        return self.mode == "sync" and not self.compression

    @property
    def in_steps(self) -> bool:
        return self.waits

    @property
    def waits(self) -> bool:
        """Whether workers do steps together."""
        return self.mode == "sync"

    @property
    def transport(self) -> Literal["auto", "shm", "gloo"]:
        """How the workers meet: that they do so over the network means that servers are reached over it too."""
        return "gloo" if self.over == "tcp" else self.over

    def __str__(self) -> str:
        text = f"ps:{self.mode}:servers={self.servers}"
        if self.backups:
            text += f":backups={self.backups}"
        if self.staleness is not None:
            text += f":staleness={self.staleness}"
        for name, usual in FREE.items():
            if (value := getattr(self, name)) != usual:
                text += f":{name}" if value is True else f":{name}={value}"
        if self.compression:
            text += f":{self.compression}" + (":always" if self.always else "")
        return text + (f":{self.over}" if self.over != "auto" else "")

    def serve(self, host: ServerHost) -> int:
        from distbelief.strategies.ps.server.process import serve
        from distbelief.strategies.ps.server.runstores import RunStores

        return serve(host, lambda host: RunStores(host, host.load()))

    @property
    def preloads(self) -> Sequence[str]:
        return (
            "distbelief.strategies.ps.worker.prepared",
            "distbelief.strategies.ps.worker.asynctraining",
            "distbelief.strategies.ps.server.process",
            "distbelief.strategies.ps.server.runstores",
        )

    def prepare(self, job: Job, schedule: Schedule, device: torch.device) -> PreparedParameterServer:
        from distbelief.strategies.ps.worker.prepared import PreparedParameterServer

        return PreparedParameterServer(job, schedule, device, self)


def parse(text: str, options: Sequence[str]) -> ParameterServer:
    """The strategy that a command line names.

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
