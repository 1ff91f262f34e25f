"""The strategies that divide the model: pipeline, tensor, sharded, and hybrids of them.

Values and parsing only, without torch, so that the command line and the coordinator start fast. `rules/degrees.py` of
the package `strategies` says which member holds which part; the other files of this package do the work on members.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from distbelief.compression.option import NAMES as COMPRESSIONS
from distbelief.compression.option import checked_compression
from distbelief.errors import JobError
from distbelief.instrument import Instrument
from distbelief.strategies.base import Strategy
from distbelief.strategies.mesh.rules.schedules import DEFAULT_SCHEDULE, SCHEDULES, PipelineSchedule
from distbelief.strategies.rules.degrees import Wish, dotted


class Meshed(Strategy):
    """The common base of the strategies that divide the model."""

    on_workers: ClassVar[str] = "distbelief.strategies.mesh.run.prepared"
    instruments: ClassVar[tuple[Instrument, ...]] = (
        Instrument("forward", "distbelief.strategies.mesh.run.runner", "StageRunner", ("_forward",)),
        Instrument(
            "backward",
            "distbelief.strategies.mesh.run.runner",
            "StageRunner",
            ("_backward", "_backward_input", "_backward_weight"),
        ),
        Instrument("reduce", "distbelief.strategies.mesh.run.gradientsum", "DataParallelSum", ("add",)),
        Instrument("reduce", "distbelief.strategies.mesh.run.gradientsum", "TiedSum", ("add",)),
        Instrument("optimizer", "distbelief.strategies.mesh.state.memberstate", "MemberState", ("apply",)),
        Instrument("wait", "distbelief.strategies.mesh.run.stagetransfer", "StageTransfer", ("_wait_for",)),
        Instrument("wait", "distbelief.strategies.mesh.run.replica", "MeshReplica", ("_vote",)),
    )

    snapshots: int | None
    """Steps between two snapshots in a neighbour's memory. None: chosen by their cost; 0: none."""
    schedule: PipelineSchedule = DEFAULT_SCHEDULE
    """The order of the pipeline's passes, if the strategy has a pipeline."""
    compression: str = ""
    """The codec for gradients between members that hold the same part: bf16, int8 or topk=0.01."""
    always: bool = False
    """Whether compression stays on even where the link is faster than the codec."""

    @property
    def exact(self) -> bool:
        """False: sums are taken in another order than in one process, so results are equal within rounding only."""
        return False

    @property
    def transport(self) -> Literal["gloo"]:
        return "gloo"

    @property
    @abstractmethod
    def wish(self) -> Wish:
        """The degrees that the strategy requests."""

    def source_text(self, source: str) -> str:
        return "snapshots in the memory of neighbours" if source == "snapshots" else super().source_text(source)

    def _check(self, **degrees: int | None) -> None:
        for name, degree in degrees.items():
            _check_number(name, degree, least=1)
        if self.snapshots is not None:
            _check_number("snapshots", self.snapshots, least=0)

    def _options(self, schedule: str = DEFAULT_SCHEDULE) -> str:
        named = f":{schedule}" if schedule != DEFAULT_SCHEDULE else ""
        named += f":snapshots={self.snapshots}" if self.snapshots is not None else ""
        return named + (f":{self.compression}" if self.compression else "") + (":always" if self.always else "")


@dataclass(frozen=True)
class Pipeline(Meshed):
    """The model is cut into stages, one per member; shards go through them one after the other.

    A multiple of `stages` workers makes several pipelines, each with its part of the data.

    >>> str(Pipeline(4)), str(Pipeline(2, "zbv", snapshots=50))
    ('pipeline:4', 'pipeline:2:zbv:snapshots=50')
    """

    stages: int
    schedule: PipelineSchedule = DEFAULT_SCHEDULE
    snapshots: int | None = None

    def __post_init__(self) -> None:
        self._check(stages=self.stages)
        _check_schedule(self.schedule)

    def __str__(self) -> str:
        return f"pipeline:{self.stages}{self._options(self.schedule)}"

    @property
    def wish(self) -> Wish:
        return Wish(data=None, sharded=1, pipeline=self.stages)


@dataclass(frozen=True)
class Tensor(Meshed):
    """Every large layer is divided among `degree` members, which compute it together.

    >>> str(Tensor(2))
    'tensor:2'
    """

    degree: int
    snapshots: int | None = None

    def __post_init__(self) -> None:
        self._check(degree=self.degree)

    def __str__(self) -> str:
        return f"tensor:{self.degree}{self._options()}"

    @property
    def wish(self) -> Wish:
        return Wish(data=None, sharded=1, tensor=self.degree)


@dataclass(frozen=True)
class Sharded(Meshed):
    """Parameters, gradients and optimizer state are divided among all members (FSDP); each has its part of the data.

    >>> str(Sharded(snapshots=0))
    'sharded:snapshots=0'
    """

    snapshots: int | None = None

    def __post_init__(self) -> None:
        self._check()

    def __str__(self) -> str:
        return f"sharded{self._options()}"

    @property
    def wish(self) -> Wish:
        return Wish(data=1, sharded=None)


@dataclass(frozen=True)
class Hybrid(Meshed):
    """Several ways of dividing at once; their product is the number of workers.

    >>> str(Hybrid(data=2, tensor=2, pipeline=2)), str(Hybrid(data=2, sharded=2))
    ('dp2.tp2.pp2', 'dp2.fsdp2')
    """

    data: int | None = None
    """None: as many groups as there are workers for."""
    tensor: int = 1
    pipeline: int = 1
    sharded: int = 1
    schedule: PipelineSchedule = DEFAULT_SCHEDULE
    snapshots: int | None = None
    compression: str = ""
    always: bool = False

    def __post_init__(self) -> None:
        self._check(tensor=self.tensor, pipeline=self.pipeline, sharded=self.sharded)
        if self.data is not None:
            self._check(data=self.data)
        _check_schedule(self.schedule)
        if self.schedule != DEFAULT_SCHEDULE and self.pipeline == 1:
            raise JobError(
                f"the schedule {self.schedule} is for pipelines, and {self} has none", hint="add a pipeline, as in pp2"
            )
        if self.data is None and self.tensor * self.pipeline * self.sharded == 1:
            raise JobError("a hybrid strategy must divide something", hint="for example dp2.tp2.pp2 or dp2.fsdp2")
        self._check_compression()

    def _check_compression(self) -> None:
        object.__setattr__(
            self, "compression", checked_compression(self.compression, self.always, "dp2.pp2:int8:always")
        )
        if not self.compression:
            return
        if self.compression.startswith("powersgd"):
            raise JobError(
                "powersgd cannot compress the gradients of a model that is divided",
                hint="use bf16, int8 or topk=0.01 here, or allreduce:powersgd=4",
            )
        if self.data is None or self.data < 2:
            raise no_gradients_travel(str(self))

    def __str__(self) -> str:
        return dotted(self.data, self.sharded, self.tensor, self.pipeline) + self._options(self.schedule)

    @property
    def wish(self) -> Wish:
        return Wish(self.data, self.sharded, self.tensor, self.pipeline)


def no_gradients_travel(strategy: str) -> JobError:
    return JobError(
        f"there is nothing to compress in {strategy}: only gradients between members with the same part of the model "
        f"are compressed, and {strategy} asks for no such members",
        hint="ask with dp2 or more, as in dp2.pp2:int8; activations and pieces of a sharded model go uncompressed",
    )


def _check_number(name: str, number: int | None, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise JobError(f"{name} must be a whole number of at least {least}, not {number!r}")


def _check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise JobError(f"unknown schedule {schedule!r}", hint=f"schedules of a pipeline: {', '.join(SCHEDULES)}")


_DEGREES = {"dp": "data", "fsdp": "sharded", "tp": "tensor", "pp": "pipeline"}
_PART = re.compile(r"([a-z]+)(\d*)")


def parse(text: str, options: Sequence[str]) -> Meshed:
    """Parse the strategy's string form.

    >>> parse("pipeline:4:zbv", ["4", "zbv"])
    Pipeline(stages=4, schedule='zbv', snapshots=None)
    >>> parse("dp2.tp2.pp2:snapshots=50", ["snapshots=50"])
    Hybrid(data=2, tensor=2, pipeline=2, sharded=1, schedule='1f1b', snapshots=50, compression='', always=False)
    """
    name = text.partition(":")[0]
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
