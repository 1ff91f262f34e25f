"""The strategy `sandblaster` as a value, and its parser. No torch: the command line and the coordinator load it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from distbelief.errors import JobError
from distbelief.instrument import Instrument
from distbelief.job import Job
from distbelief.strategies.base import Strategy
from distbelief.strategies.ps.strategy import SERVER_WAITS
from distbelief.strategies.sandblaster.rules.portions import WholeData, usual_portion, whole_data

_FORM = "sandblaster:servers=2:history=10:portion=64:lr=1.0, each of them optional, and shm or tcp"


@dataclass(frozen=True)
class Sandblaster(Strategy):
    """A step is one iteration of L-BFGS: a direction, and a line search along it. The loss is over all samples. The
    job's optimizer is not used. The weights are the same, bit for bit, on any number of workers and servers.

    >>> str(Sandblaster()), str(Sandblaster(servers=3, history=5, portion=100, over="tcp"))
    ('sandblaster:servers=2', 'sandblaster:servers=3:history=5:portion=100:tcp')
    """

    on_workers: ClassVar[str] = "distbelief.strategies.sandblaster.prepared"
    on_servers: ClassVar[str] = "distbelief.strategies.sandblaster.slices"
    plain_loop: ClassVar[str] = "search"
    instruments: ClassVar[tuple[Instrument, ...]] = (
        Instrument("optimizer", "distbelief.strategies.sandblaster.member", "SearchingMember", ("_drive",)),
        *SERVER_WAITS,
    )

    servers: int = 2
    history: int = 10
    """The number of pairs (step, change of the gradient) that the search keeps: each is two vectors as large as the
    parameters."""
    portion: int | None = None
    """The number of samples that a worker computes at once. Default: a 64th of all, at most the job's global_batch."""
    lr: float = 1.0
    """The first step of a line search, relative to the length that the history suggests."""
    over: Literal["auto", "shm", "tcp"] = "auto"

    def __post_init__(self) -> None:
        for name in ("servers", "history", "portion"):
            value = getattr(self, name)
            if value is None and name == "portion":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise JobError(
                    f"sandblaster: {name} must be a whole number of at least 1, not {value!r}", hint=f"write {_FORM}"
                )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise JobError(f"sandblaster: lr must be above 0, not {self.lr!r}", hint="the default is 1")
        if self.over not in ("auto", "shm", "tcp"):
            raise JobError(f"unknown transport '{self.over}'", hint="use auto, shm (one host) or tcp")

    @property
    def exact(self) -> bool:
        return True

    @property
    def no_replay(self) -> str:
        return "its steps are line searches with a history"

    @property
    def balances(self) -> bool:
        return False  # members take small portions of a step

    @property
    def transport(self) -> Literal["auto", "shm", "gloo"]:
        """The exchange between workers. If it uses the network, servers are reached over the network too."""
        return "gloo" if self.over == "tcp" else self.over

    @property
    def work_unit(self) -> str:
        return "portion"

    @property
    def learning(self) -> str:
        return str(replace(self, servers=2, over="auto"))

    def __str__(self) -> str:
        text = f"sandblaster:servers={self.servers}"
        text += f":history={self.history}" if self.history != 10 else ""
        text += f":portion={self.portion}" if self.portion is not None else ""
        text += f":lr={self.lr!r}" if self.lr != 1.0 else ""
        return text + (f":{self.over}" if self.over != "auto" else "")

    def schedule_of(self, job: Job, samples: int) -> WholeData:
        if job.after_update:
            raise JobError(
                "sandblaster cannot apply `after_update`: L-BFGS compares losses along a line of parameters",
                hint="leave `after_update` out of the job, or use another strategy, such as allreduce",
            )
        return whole_data(samples, min(self.portion or usual_portion(job, samples), samples))


def parse(text: str, options: Sequence[str]) -> Sandblaster:
    """Parse the strategy from a command line.

    >>> parse("sandblaster:history=5", ["history=5"])
    Sandblaster(servers=2, history=5, portion=None, lr=1.0, over='auto')
    """
    values: dict[str, Any] = {}
    kinds: dict[str, type] = {"servers": int, "history": int, "portion": int, "lr": float}
    for option in options:
        key, equals, number = option.partition("=")
        if option in ("auto", "shm", "tcp"):
            key, value = "over", option
        elif key in kinds and equals:
            try:
                value = kinds[key](number)
            except ValueError:
                what = "a whole number" if kinds[key] is int else "a number"
                raise JobError(
                    f"'{option}' in the strategy '{text}' does not give {what}", hint=f"write {_FORM}"
                ) from None
        else:
            raise JobError(f"unknown option '{option}' in the strategy '{text}'", hint=f"write {_FORM}")
        if key in values:
            raise JobError(f"the strategy '{text}' gives its {key} twice", hint="give it once")
        values[key] = value
    return Sandblaster(**values)
