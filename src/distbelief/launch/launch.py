"""A launch: the job, its options and its placement; its form in launch.json; the specs of members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from distbelief.atomicfile import replace_file
from distbelief.control.credentials import Authority, Credential, KeyAuthority
from distbelief.control.sockets import is_loopback
from distbelief.errors import DistBeliefError, JobError
from distbelief.launch.rundir import check_idle
from distbelief.options import RunOptions, recheck_plan
from distbelief.strategies import parse, plugin, require
from distbelief.strategies.base import Strategy
from distbelief.strategies.rules import degrees
from distbelief.transport.shm import futexflags
from distbelief.worker.spec import JobSource, WorkerSpec, checkpoint_folder

LOOPBACK_ONLY = "tcp://127.0.0.1:*"
LOADING_S = 1800.0  # the longest silence while workers load the job; the agent notices their exits at once anyway


class Observer(Protocol):
    """Shows the progress of a run (see observe/view.py)."""

    def started(self, run_dir: Path, workers: int) -> None: ...

    def log(self, source: str, line: str) -> None: ...

    def refresh(self) -> None: ...


class Placement(msgspec.Struct, frozen=True, rename={"blocks_signals": "shelters"}):
    """The placement of a run: the engine that brings the hosts, the coordinator's address, the processes on this
    host."""

    on: str = "local"
    """The engine that brings the hosts (`--on`)."""
    listen: str = LOOPBACK_ONLY
    """The coordinator's address. Beyond loopback, other hosts can join."""
    key_file: str = ""
    """The key file; empty: this start of the run has a secret of its own."""
    local_workers: int = -1
    """The number of workers that this process starts; agents of other hosts start the rest. -1: all."""
    local_servers: int = -1
    """The number of parameter servers that this process starts. -1: all."""
    room: int = -1
    """The most workers that this process ever starts; -1: no limit."""
    blocks_signals: bool = False
    """Whether the launcher sends its signals to every process: they are then blocked in all but the leading one."""
    is_open: bool = False
    """Whether agents of other hosts may come even if the coordinator listens on loopback only."""
    host: str = ""
    """This machine's name in the run; empty: its own name. It belongs to one start: a resume does not keep it."""


@dataclass(frozen=True)
class Invitation:
    """The data that the agent of another host needs to take part in a run. The coordinator admits every agent that has
    it."""

    address: str
    """The coordinator's address, as in tcp://10.0.0.1:5555."""
    access: Authority | KeyAuthority
    """Of a host with the key file a KeyAuthority: it can join every run with that key."""


def _unchanged(spec: WorkerSpec) -> WorkerSpec:
    return spec


@dataclass(frozen=True)
class Launch:
    """The job, its options, and its placement."""

    run_dir: Path
    options: RunOptions
    job: JobSource = field(default_factory=JobSource)
    placement: Placement = field(default_factory=Placement)
    run_id: str = ""
    """A random name of the run, which its checkpoints repeat: no run takes another one's state."""
    resumed: bool = False
    """Continue the run that is in the run directory."""
    is_away: bool = False
    """This host does not see the run directory of the run; `run_dir` is a folder of its own."""
    adjust: Callable[[WorkerSpec], WorkerSpec] = _unchanged
    """Changes a worker's spec: chaos puts a relay between a worker and the coordinator."""

    def __post_init__(self) -> None:
        """Check what can be known before any process is started; only workers know the number of shards."""
        options = self.options
        wants_recheck = options.recheck.strip().lower() not in ("auto", "never")
        if wants_recheck and options.impure:
            raise JobError(
                "the gradients of an impure job differ whenever they are computed again: --recheck would end the run",
                hint="leave out --recheck or --impure",
            )
        if wants_recheck and not self.strategy.rechecks:
            raise JobError(
                f"{options.strategy} cannot recheck: its members do not compute single shards whose gradients could be "
                "compared",
                hint="leave --recheck out, or train with allreduce",
            )
        wish = self.strategy.wish
        if wish is None:
            return
        problem = degrees.problem(wish, options.workers, shards=None)
        if problem:
            raise JobError(problem)
        if options.shares:
            raise JobError(
                f"shares cannot be given with {options.strategy}, in which all groups have equally many shards",
                hint="leave --shares out",
            )

    @property
    def strategy(self) -> Strategy:
        return parse(self.options.strategy)

    @property
    def checkpoint_folder(self) -> str:
        return checkpoint_folder(self.options, self.run_dir)

    @property
    def usable_transport(self) -> str:
        """The transport with `auto` resolved: it becomes gloo unless all members can share memory and no other host can
        join, or every member has its own state on an accelerator."""
        alone = futexflags.supported and (not self.takes_hosts or self.on_accelerators)
        transport: str = self.strategy.transport
        return "gloo" if transport == "auto" and not alone else transport

    @property
    def on_accelerators(self) -> bool:
        """Whether the run's state is on accelerators."""
        return self.options.device.partition(":")[0] != "cpu" and self.strategy.state_on_device

    @property
    def needs_store(self) -> bool:
        """Whether members may use torch groups, which need a rendezvous store."""
        return self.usable_transport in ("gloo", "nccl") or self.on_accelerators

    @property
    def takes_hosts(self) -> bool:
        """Whether agents of other hosts can take part: they must be able to reach the coordinator."""
        return self.placement.is_open or not is_loopback(self.placement.listen)

    @property
    def not_rechecked(self) -> str:
        """A warning about what `--recheck all` does not compare in this run; empty: nothing, or another rate."""
        if not recheck_plan(self.options.recheck).whole:
            return ""
        left_out = self.strategy.not_rechecked
        if self.on_accelerators:
            left_out = left_out or "the sums of all workers' gradients and the updates on accelerators"
        elif self.options.workers == 1:
            left_out = left_out or "the updates by a single worker"
        if not left_out:
            return ""
        return (
            f"all gradients are computed twice and compared; {left_out} are not: a bit that flips there gets into the "
            "weights. allreduce with 2 workers or more on CPUs compares these too"
        )

    @property
    def in_the_clear(self) -> str:
        """A warning about bytes that travel unencrypted between hosts; empty: there are none."""
        if is_loopback(self.placement.listen) or not self.needs_store:
            return ""
        if self.strategy.servers:
            return (
                "parameters and gradients travel encrypted; the workers' own messages over gloo do not: "
                "use a network that you trust"
            )
        return (
            "gradients travel between hosts over gloo, which encrypts nothing: use a network that you trust, "
            "or --strategy ps:sync, which encrypts them and gives the same weights"
        )

    def run_config(self) -> dict[str, Any]:
        """The coordinator's RunConfig: the options, and values derived from them here."""
        options, placement = self.options, self.placement
        config: dict[str, Any] = msgspec.to_builtins(options.with_absolute_paths())
        return config | {
            "servers": self.strategy.servers,
            "local_workers": placement.local_workers,
            "local_servers": placement.local_servers,
            "takes_hosts": self.takes_hosts and self.strategy.transport != "shm",
            "on_accelerators": self.on_accelerators,
            "transport": self.usable_transport,
            "exact": self.strategy.exact and not options.impure,
            "gather_timeout_s": LOADING_S,
            "balance": options.balance and self.strategy.balances,
        }

    def worker_spec(
        self,
        worker: int,
        host: str,
        address: str,
        credential: Credential,
        store: tuple[str, int] | None = None,
        place: int = 0,
    ) -> WorkerSpec:
        """A worker's spec. `address`: the coordinator's; `store`: the rendezvous, where torch groups are used; `place`:
        the worker's index among the workers of its host."""
        spec = WorkerSpec(
            worker=worker,
            host=host,
            address=address,
            credential=credential,
            run_dir=str(self.run_dir),
            options=self.options.with_absolute_paths(),
            job=msgspec.structs.replace(self.job, pickled=b""),
            store=store,
            shares_memory=self.usable_transport != "gloo",
            place=place,
            resumed=self.resumed,
            is_away=self.is_away,
            plugin=plugin(self.options.strategy),
            run_id=self.run_id,
        )
        return self.adjust(spec)

    def placed(self, **changes: Any) -> Launch:
        """The same launch with another placement. `changes`: fields of Placement."""
        return replace(self, placement=msgspec.structs.replace(self.placement, **changes))

    def with_options(self, **changes: Any) -> Launch:
        return replace(self, options=msgspec.structs.replace(self.options, **changes))


# --- how it is kept for a resume -------------------------------------------------------------------------------------

_FILE = "launch.json"
_OF_ONE_START = ("pickled", "host")


def keep_launch(launch: Launch) -> None:
    """Write launch.json, from which `resume` starts the run again."""
    if launch.resumed:
        check_idle(launch.run_dir)
    try:
        content = msgspec.json.format(msgspec.json.encode(to_data(launch)), indent=2) + b"\n"
        replace_file(launch.run_dir / _FILE, content, private=True, durable=True)
    except OSError as error:
        raise DistBeliefError(f"cannot write {launch.run_dir / _FILE}: {error.strerror}") from error


def to_data(launch: Launch) -> dict[str, Any]:
    """The fields that stay the same across starts and hosts. All fields are on one level, as in earlier versions of
    DistBelief, so a run of an earlier version can be resumed."""
    job = msgspec.structs.replace(launch.job, pickled=b"")
    parts = (launch.options.with_absolute_paths(), job, launch.placement)
    data: dict[str, Any] = {}
    for part in parts:
        data |= msgspec.to_builtins(part)
    data = {name: value for name, value in data.items() if name not in _OF_ONE_START}
    more = {"plugin": plugin(launch.options.strategy), "run_id": launch.run_id}
    return data | {name: value for name, value in more.items() if value}


def from_data(run_dir: Path, data: dict[str, Any], host: str = "") -> Launch:
    """Unknown fields are ignored: another version of DistBelief may have written them. `host`: what this machine is
    called in the run."""
    options, job = msgspec.convert(data, RunOptions), msgspec.convert(data, JobSource)
    require(options.strategy, data.get("plugin", ""), host)
    run_id = msgspec.convert(data.get("run_id", ""), str)
    return Launch(run_dir, options, job, msgspec.convert(data, Placement), run_id)


def is_launched(run_dir: Path) -> bool:
    """Whether a run was started in that directory."""
    return (run_dir / _FILE).is_file()


def read_launch(run_dir: Path, host: str = "") -> Launch:
    """How the run in that directory was started. `host`: what this machine is called in the run."""
    file = run_dir / _FILE
    try:
        return from_data(run_dir, msgspec.json.decode(file.read_bytes(), type=dict[str, Any]), host)
    except FileNotFoundError:
        raise DistBeliefError(
            f"{run_dir} is no run directory: there is no {_FILE} in it", hint="give the folder that `train` printed"
        ) from None
    except OSError as error:
        raise DistBeliefError(f"cannot read {file}: {error.strerror}") from error
    except JobError:  # this version of DistBelief does not have the strategy, or it does not suit the workers
        raise
    except (msgspec.MsgspecError, DistBeliefError) as error:
        raise DistBeliefError(
            f"{file} is damaged: {error}",
            hint="restore it from a copy. If the run saves its checkpoints elsewhere (--checkpoints): "
            "`distbelief resume CHECKPOINTS --run-dir NEW`",
        ) from error
