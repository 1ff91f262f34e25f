"""The options of a run: one value, from the command line or `train()` to the coordinator and the workers.

Each option is declared once, as a field of `RunOptions`: its name, type, default, help text and check. The command line
makes its flags from the declarations; `train()` takes them as keyword arguments; the run directory keeps them in
launch.json, so that `resume` finds them; the coordinator and every worker are sent the whole value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, get_args, get_type_hints

import msgspec

from distbelief.errors import DistBeliefError

DEFAULT_STRATEGY = "allreduce"
STUCK_AFTER_S = 300.0
RECHECKED_EVERY = 128
"""Steps between two rechecks, unless the user chooses. docs/recheck.md derives the number."""
USUAL_STEPS = "auto"
"""Value of `profile`: some steps after the first ones."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh])", re.ASCII)
_PASSWORD = re.compile(r"(\w+)://[^/@:]*:([^/@]+)@")
_STEPS = re.compile(r"(\d+):(\d+)", re.ASCII)


# --- what the texts of options mean ----------------------------------------------------------------------------------


class SavePlan(msgspec.Struct, frozen=True):
    """The folder of a worker's checkpoints, which steps it saves without a request, and which checkpoints are kept."""

    folder: str
    every_steps: int = 0
    """0: only the last checkpoint, and checkpoints that the coordinator requests."""
    keep_last: int = 3
    keep_every: int = 0
    """Keep checkpoints whose step is a multiple of this; 0: none for this reason."""
    keep_best: tuple[str, bool] | None = None
    """A metric, and whether higher is better."""


class RecheckPlan(msgspec.Struct, frozen=True):
    """Which steps are rechecked: one in `every`; 0: none. `whole`: all shards of such a step, instead of a few."""

    every: int = 0
    whole: bool = False


NEVER = RecheckPlan()


class ProfilePlan(msgspec.Struct, frozen=True):
    """The steps that a worker profiles: from `first` to before `end`. `end` 0: some steps after the first ones."""

    first: int
    end: int
    is_sent: bool = False
    """Whether the worker sends its records to the coordinator, because its host does not see the run directory."""


@lru_cache(maxsize=64)
def interval(text: str) -> tuple[int, float] | None:
    """(steps, seconds) between two checkpoints. One of them is 0; both are 0: only the last state. None: never.

    >>> interval("500"), interval("90s"), interval("1.5h"), interval("end"), interval("never")
    ((500, 0.0), (0, 90.0), (0, 5400.0), (0, 0.0), None)
    """
    wanted = text.strip().lower()
    if wanted == "never":
        return None
    if wanted == "end":
        return 0, 0.0
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted), 0.0
    if (match := _TIME.fullmatch(wanted)) and float(match[1]) > 0:
        return 0, float(match[1]) * _UNITS[match[2]]
    raise DistBeliefError(
        f"{text!r} does not say how often to save",
        hint="give a number of steps (500), a time (30s, 10m, 2h), `end` for the last state alone, or `never`",
    )


def best(text: str) -> tuple[str, bool] | None:
    """The metric of the best checkpoint, and whether higher is better. Without :min or :max, lower is better for losses
    and errors, higher for everything else.

    >>> best("accuracy"), best("loss"), best("distance:min"), best("")
    (('accuracy', True), ('loss', False), ('distance', False), None)
    """
    if not text:
        return None
    name, _, order = text.partition(":")
    if not name or order not in ("", "min", "max"):
        raise DistBeliefError(
            f"{text!r} does not say what the best checkpoint is", hint="give a metric: accuracy, loss, or distance:min"
        )
    lower = order == "min" or (not order and any(word in name.lower() for word in ("loss", "error", "perplexity")))
    return name, not lower


@lru_cache(maxsize=64)
def recheck_plan(text: str) -> RecheckPlan:
    """
    >>> recheck_plan("auto"), recheck_plan("all"), recheck_plan("10")
    (RecheckPlan(every=128, whole=False), RecheckPlan(every=1, whole=True), RecheckPlan(every=10, whole=False))
    >>> recheck_plan("never")
    RecheckPlan(every=0, whole=False)
    """
    wanted = text.strip().lower()
    named = {"auto": RecheckPlan(RECHECKED_EVERY), "all": RecheckPlan(1, whole=True), "never": NEVER}
    if wanted in named:
        return named[wanted]
    if wanted.isdecimal() and wanted.isascii() and int(wanted) > 0:
        return RecheckPlan(int(wanted))
    raise DistBeliefError(
        f"{text!r} does not say how often to recheck",
        hint="give `auto`, `all`, `never`, or a number N for one step in N",
    )


def profile_plan(text: str, is_sent: bool = False) -> ProfilePlan | None:
    """
    >>> profile_plan("10:20"), profile_plan("auto").end, profile_plan("")
    (ProfilePlan(first=10, end=20, is_sent=False), 0, None)
    """
    if not text:
        return None
    if text == USUAL_STEPS:
        return ProfilePlan(0, 0, is_sent)
    steps = _STEPS.fullmatch(text.strip())
    if not steps or int(steps[1]) >= int(steps[2]):
        raise DistBeliefError(
            f"{text!r} does not say which steps to profile",
            hint="give FIRST:END, counted from 0; END itself is not profiled: 10:20",
        )
    return ProfilePlan(int(steps[1]), int(steps[2]), is_sent)


def profile_text(profile: bool | str | tuple[int, int]) -> str:
    """The text of `train(profile=…)`.

    >>> profile_text(False), profile_text(True), profile_text("5:8"), profile_text((5, 8))
    ('', 'auto', '5:8', '5:8')
    """
    if isinstance(profile, bool):
        return USUAL_STEPS if profile else ""
    return profile if isinstance(profile, str) else ":".join(str(step) for step in profile)


def without_password(where: str) -> None:
    """Raises if a URL holds a password: it would stay in the files of the run.

    >>> without_password("s3://bucket/run"), without_password("sftp://me@host/run")
    (None, None)
    """
    if not (found := _PASSWORD.search(where)):
        return
    protocol = found[1].upper()
    names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if protocol == "S3" else f"FSSPEC_{protocol}_PASSWORD"
    shown = where[: found.start(2)] + "…" + where[found.end(2) :]
    raise DistBeliefError(
        f"{shown} has a password in it, which would stay in the files of the run",
        hint=f"leave it out of the URL, and set it in the environment: {names}",
    )


def absolute(where: str) -> str:
    """A path that stays valid when the process changes its folder. URLs and empty texts stay as they are."""
    return os.path.abspath(where) if where and "://" not in where else where


# --- the options -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """The declaration of an option, besides its name, type and default."""

    help: str
    flag: str = ""
    """The option's name on the command line; empty: derived from the field's name."""
    metavar: str | None = None
    least: float | None = None
    check: Callable[[Any], object] | None = None
    """Raises a DistBeliefError for a value that cannot be used."""


class RunOptions(msgspec.Struct, frozen=True):
    """The user's choices for a run, except the job and the machines. The constructor checks all of them.

    >>> RunOptions(workers=2, strategy="allreduce", save_every="500").save_plan("/run/checkpoints").every_steps
    500
    """

    workers: Annotated[int, Option("Worker processes.", least=1)]
    strategy: Annotated[
        str,
        Option(
            "The strategy: allreduce, ps:sync, ps:async or ps:ssp:staleness=S (parameter servers), sandblaster "
            "(L-BFGS), local_sgd:H, pipeline:K, tensor:K, sharded, or degrees such as dp2.tp2.pp2 and dp2.fsdp2; "
            "options follow after colons, as in allreduce:gloo, ps:sync:servers=3:backups=1, "
            "ps:async:adaptive:dc=0.04, pipeline:4:zbv; with a compression for slow links as in allreduce:int8, "
            "ps:async:int8, local_sgd:8:topk=0.01 or dp2.pp2:bf16."
        ),
    ]
    shares: Annotated[tuple[float, ...], Option("Relative shares of the work, one per worker.", metavar="2,1,1")] = ()
    threads: Annotated[int, Option("Threads of each worker; part of the exact result.", least=1)] = 1
    device: Annotated[str, Option("The device of each worker.")] = "cpu"
    min_workers: Annotated[
        int, Option("With fewer workers alive, wait for more instead of going on.", metavar="N", least=1)
    ] = 1
    balance: Annotated[bool, Option("Move shards to faster workers. The result does not change.")] = True
    stuck_after_s: Annotated[
        float,
        Option(
            "Replace a worker that all others have waited for this long (a frozen worker is replaced sooner).",
            flag="--stuck-after",
            metavar="SECONDS",
            least=1,
        ),
    ] = STUCK_AFTER_S
    save_every: Annotated[
        str,
        Option(
            "Steps or time between two checkpoints; the last state is saved too.",
            metavar="500|10m|end|never",
            check=interval,
        ),
    ] = "10m"
    checkpoints: Annotated[
        str,
        Option(
            "Where checkpoints go: a folder, s3://… Default: RUN/checkpoints.", metavar="URL", check=without_password
        ),
    ] = ""
    keep_last: Annotated[int, Option("Keep the newest K checkpoints.", metavar="K", least=1)] = 3
    keep_every: Annotated[int, Option("Keep also checkpoints whose step is a multiple of M.", metavar="M", least=0)] = 0
    keep_best: Annotated[
        str,
        Option("Keep also the best checkpoint by a metric of the evaluation.", metavar="METRIC[:min|:max]", check=best),
    ] = ""
    begin_from: Annotated[
        str,
        Option(
            "Weights to begin with: a run, a checkpoint, a .safetensors file.",
            flag="--from",
            metavar="PATH",
            check=without_password,
        ),
    ] = ""
    profile: Annotated[
        str, Option('Steps to profile, as in "10:20"; "auto": some steps after the first ones.', check=profile_plan)
    ] = ""
    impure: Annotated[
        bool,
        Option("Train although the purity check finds that the result will depend on the cluster; say so once."),
    ] = False
    recheck: Annotated[
        str,
        Option(
            "How often another worker computes a shard again, to find machines that compute wrongly and code with "
            "hidden state: all shards of every step, a few shards of one step in N, or never.",
            metavar="auto|all|never|N",
            check=recheck_plan,
        ),
    ] = "auto"
    most_steps: Annotated[int, Option("End the run after this many steps; 0: as many as the job has.", least=0)] = 0

    def __post_init__(self) -> None:
        for name, declared in declared_options().items():
            value = getattr(self, name)
            if declared.option.least is not None and not value >= declared.option.least:
                raise DistBeliefError(f"{name} must be at least {declared.option.least:g}, not {value}")
            if declared.option.check:
                declared.option.check(value)
        if self.min_workers > self.workers:
            raise DistBeliefError(
                f"min_workers must be from 1 to the number of workers ({self.workers}), not {self.min_workers}"
            )
        if self.shares and len(self.shares) != self.workers:
            raise DistBeliefError(
                f"{len(self.shares)} shares for {self.workers} workers", hint="give one number per worker, or none"
            )
        if any(not 0 < share < float("inf") for share in self.shares):
            raise DistBeliefError(f"every share must be a finite number above 0, not {list(self.shares)}")

    @property
    def saves(self) -> bool:
        """Whether the run saves any checkpoint, at least of the last state."""
        return interval(self.save_every) is not None

    @property
    def save_every_s(self) -> float:
        """Seconds between two checkpoints, which the coordinator counts. 0: workers count steps, or only the end."""
        return (interval(self.save_every) or (0, 0.0))[1]

    def save_plan(self, folder: str) -> SavePlan | None:
        every = interval(self.save_every)
        return every and SavePlan(folder, every[0], self.keep_last, self.keep_every, best(self.keep_best))

    def with_absolute_paths(self) -> RunOptions:
        return msgspec.structs.replace(
            self, checkpoints=absolute(self.checkpoints), begin_from=absolute(self.begin_from)
        )


@dataclass(frozen=True)
class Declared:
    """An option as `RunOptions` declares it."""

    type: Any
    default: Any
    """msgspec.NODEFAULT: every run must give a value."""
    option: Option


@cache
def declared_options() -> dict[str, Declared]:
    """Every option, by its name."""
    hints = get_type_hints(RunOptions, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(RunOptions):
        kind, option = get_args(hints[field.name])
        found[field.name] = Declared(kind, field.default, option)
    return found
