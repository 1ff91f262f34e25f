"""local_sgd: replicas of the model train separately for some steps, then one outer step combines them.

This module has the value and its parser, without torch. A member's part of a round is in replica.py, a replica's local
steps are in trainer.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from distbelief.compression.option import NAMES as COMPRESSIONS
from distbelief.compression.option import canonical
from distbelief.errors import JobError
from distbelief.instrument import Instrument
from distbelief.job import Job
from distbelief.strategies.base import Strategy
from distbelief.strategies.dataparallel.strategy import REPLICA_UPDATE

Outer = Literal["average", "nesterov"]
Transport = Literal["auto", "shm", "gloo"]

LR = 0.7
"""The learning rate of the outer step with Nesterov's momentum, as in DiLoCo (arXiv:2311.08105)."""
MOMENTUM = 0.9
USUAL_REPLICAS = 4
_FORM = (
    "local_sgd:8 (local steps), with options after it: replicas=4, nesterov, lr=0.7, momentum=0.9, shm, gloo, copies, "
    "nocopies, and a compression: bf16, int8 or topk=0.01"
)


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """R logical replicas; each takes `steps` local steps on its part of every global batch. Then their differences from
    the start of the round are averaged, and the outer optimizer applies the average. The weights do not depend on the
    number of workers.

    >>> str(LocalSGD(8)), str(LocalSGD(8, replicas=2, outer="nesterov", lr=0.5))
    ('local_sgd:8', 'local_sgd:8:replicas=2:nesterov:lr=0.5')
    """

    on_workers: ClassVar[str] = "distbelief.strategies.localsgd.prepared"
    keeps_freed_memory: ClassVar[bool] = True
    plain_loop: ClassVar[str] = "rounds"
    instruments: ClassVar[tuple[Instrument, ...]] = (
        REPLICA_UPDATE,
        Instrument("optimizer", "distbelief.strategies.localsgd.trainer", "LocalTrainer", ("_update",)),
        Instrument("wait", "distbelief.strategies.localsgd.trainer", "DeviceTrainer", ("_bring_out",)),
    )

    steps: int
    """H: local steps between two outer steps. A link carries 1/H of what allreduce sends."""
    replicas: int | None = None
    """R, fixed for the life of a run. None: 4, or as many as the job has shards if those are fewer."""
    outer: Outer = "average"
    """average: the replicas' mean; nesterov: SGD with Nesterov's momentum on their mean difference (DiLoCo)."""
    lr: float | None = None
    """The outer step's learning rate; None: 0.7 with nesterov. The average has none."""
    momentum: float | None = None
    """The outer step's momentum; None: 0.9 with nesterov. The average has none."""
    transport: Transport = "auto"
    """How differences travel: shared memory on one host, gloo across hosts; auto chooses."""
    copies: bool | None = None
    """Without shared memory: also send every replica's optimizer state and residual to another worker in every outer
    step. Off: less traffic, but after a death the run goes back to the last checkpoint. None: on, unless differences
    are compressed."""
    compression: str = ""
    """The compression of differences: bf16, int8 or topk=0.01. Each replica keeps a residual, so compression changes
    the weights in the same way on any number of workers, also in shared memory."""

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("replicas", self.replicas)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise JobError(
                    f"local_sgd: {name} must be a whole number of at least 1, not {value!r}", hint=f"write {_FORM}"
                )
        if self.outer not in get_args(Outer):
            raise JobError(f"local_sgd: outer is {' or '.join(get_args(Outer))}, not {self.outer!r}")
        if self.outer == "average" and (self.lr is not None or self.momentum is not None):
            raise JobError(
                "local_sgd: an average has no learning rate and no momentum",
                hint='say nesterov too (outer="nesterov"), or leave lr and momentum out',
            )
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise JobError(
                f"local_sgd: the outer learning rate must be above 0, not {self.lr!r}", hint=f"write {_FORM}"
            )
        if self.momentum is not None and not 0 < self.momentum < 1:
            raise JobError(
                f"local_sgd: the outer momentum must lie between 0 and 1, not {self.momentum!r}",
                hint="without momentum it is an average: leave nesterov out",
            )

        self._check_compression()

    def _check_compression(self) -> None:
        if not self.compression:
            return
        object.__setattr__(self, "compression", canonical(self.compression))
        if self.compression.startswith("powersgd"):
            raise JobError(
                "powersgd cannot compress the differences of local_sgd",
                hint="it sums matrices over all workers, whose number may differ from that of the replicas: use bf16, "
                "int8 or topk=0.01 here, or allreduce:powersgd=4",
            )

    def __str__(self) -> str:
        options = [
            *([f"replicas={self.replicas}"] if self.replicas is not None else []),
            *([self.outer] if self.outer != "average" else []),
            *([f"lr={self.lr!r}"] if self.lr is not None else []),
            *([f"momentum={self.momentum!r}"] if self.momentum is not None else []),
            *([self.transport] if self.transport != "auto" else []),
            *([self.compression] if self.compression else []),
            *(["copies" if self.copies else "nocopies"] if self.copies is not None else []),
        ]
        return ":".join(["local_sgd", str(self.steps), *options])

    @property
    def exact(self) -> bool:
        return True

    @property
    def work_unit(self) -> str:
        return "replica"

    @property
    def learning(self) -> str:
        return str(replace(self, transport="auto", copies=None))

    @property
    def no_replay(self) -> str:
        return "its replicas differ within a round"

    @property
    def stride(self) -> int:
        return self.steps

    def takeover_text(self, step: int, recomputed: int, units: int) -> str:
        if self.steps == 1 or not recomputed:
            return ""
        again = f"{recomputed} of {units} replica{'s' if units > 1 else ''}"
        return f"goes back to the last outer step, after step {step}: {again} computed again from there"

    @property
    def sends_copies(self) -> bool:
        return not self.compression if self.copies is None else self.copies

    @property
    def outer_options(self) -> dict[str, Any]:
        """The options of the outer step's torch.optim.SGD."""
        if self.outer == "average":
            return {"lr": 1.0}
        return {
            "lr": LR if self.lr is None else self.lr,
            "momentum": MOMENTUM if self.momentum is None else self.momentum,
            "nesterov": True,
        }

    def replicas_of(self, job: Job) -> int:
        """The number of replicas, which depends on the job alone."""
        shards = job.resolved_shards
        if self.replicas is None:
            return min(USUAL_REPLICAS, shards)
        if self.replicas > shards:
            raise JobError(
                f"{self.replicas} replicas are more than the {shards} shards of a step: each needs one at least",
                hint=f"set `shards` of the job to {self.replicas} or more, or have fewer replicas",
            )
        return self.replicas


def parse(text: str, options: Sequence[str]) -> LocalSGD:
    """Parse the strategy's string form.

    >>> parse("local_sgd:8:nesterov:int8", ["8", "nesterov", "int8"]) == LocalSGD(
    ...     8, outer="nesterov", compression="int8"
    ... )
    True
    """
    if not options or not options[0].isdigit():
        raise JobError(f"the strategy '{text}' does not say how many local steps there are", hint=f"write {_FORM}")
    values: dict[str, Any] = {"steps": int(options[0])}
    for option in options[1:]:
        name, value = _option(text, option)
        if name in values:
            raise JobError(f"the strategy '{text}' gives its {name} twice", hint="give it once")
        values[name] = value
    return LocalSGD(**values)


def _option(text: str, option: str) -> tuple[str, Any]:
    key, equals, number = option.partition("=")
    if option in get_args(Outer):
        return "outer", option
    if option in get_args(Transport):
        return "transport", option
    if option in ("copies", "nocopies"):
        return "copies", option == "copies"
    if key in COMPRESSIONS:
        return "compression", option
    if option == "always":
        raise JobError(
            f"always in the strategy '{text}': the compression of local_sgd is never switched off, since its weights "
            "do not depend on measured times",
            hint="leave always out",
        )
    kinds = {"replicas": int, "lr": float, "momentum": float}
    if key in kinds and equals:
        try:
            return key, kinds[key](number)
        except ValueError:
            pass
        what = "a whole number" if kinds[key] is int else "a number"
        raise JobError(f"'{option}' in the strategy '{text}' does not give {what}", hint=f"write {_FORM}")
    raise JobError(f"unknown option '{option}' in the strategy '{text}'", hint=f"write {_FORM}")
