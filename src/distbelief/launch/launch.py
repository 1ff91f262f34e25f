"""What an engine is asked to run, and who watches it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import msgspec

from distbelief.atomicfile import replace_file
from distbelief.control.credentials import Credential
from distbelief.control.sockets import is_loopback
from distbelief.coordinator.rules.detector import STUCK_S
from distbelief.errors import DistBeliefError, JobError
from distbelief.launch.rules.profileplan import profile_plan
from distbelief.launch.rules.saveplan import DEFAULT_EVERY, KEEP_LAST, best, interval
from distbelief.launch.rundir import check_idle
from distbelief.strategies import parse
from distbelief.strategies.rules import degrees
from distbelief.transport.shm import futexflags
from distbelief.worker.spec import Origin, SavePlan, WorkerSpec

LOOPBACK_ONLY = "tcp://127.0.0.1:*"
LOADING_S = 1800.0  # the longest silence while workers load their job; their exits are noticed at once anyway


class Observer(Protocol):
    """Whoever watches a run (see observe/view.py)."""

    def started(self, run_dir: Path, workers: int) -> None: ...

    def log(self, source: str, line: str) -> None: ...

    def refresh(self) -> None: ...


@dataclass(frozen=True)
class Launch:
    """What to run, and on how many workers."""

    run_dir: Path
    workers: int
    strategy: str
    exact: bool
    transport: str
    threads: int = 1
    device: str = "cpu"
    shares: tuple[float, ...] = ()
    job_file: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    job_pickle: bytes = b""
    sys_path: tuple[str, ...] = ()
    worker_threads: dict[int, int] = field(default_factory=dict)
    """Workers with another number of threads than the run's. In exact mode the canary refuses them."""
    min_workers: int = 1
    balance: bool = True
    stuck_after_s: float = STUCK_S
    listen: str = LOOPBACK_ONLY
    """Where the coordinator listens. Beyond loopback, other hosts can join."""
    key_file: str = ""
    """The file of the key that the run's secret follows from; empty: it has a secret of its own."""
    local_workers: int = -1
    """So many of the workers are started by this process; the others by agents of other hosts. -1: all."""
    local_servers: int = -1
    """Likewise parameter servers."""
    on: str = "local"
    """The engine that brings the hosts (chosen.py)."""
    shelters: bool = False
    """Its signals go to every process: all but the leading one are kept from them."""
    room: int = -1
    """The most workers that are ever started by this process; -1: no limit."""
    host: str = ""
    """What this machine is called; empty: by its own name."""
    is_open: bool = False
    """Whether agents of other hosts may come, also where only loopback is listened on."""
    dial: Callable[[int, str], str] = lambda worker, address: address
    """The address at which a worker reaches the coordinator: chaos puts itself in between."""
    most_steps: int = 0
    """End the run after so many steps, if the job has more; 0: no limit."""
    checkpoints: str = ""
    """A folder or URL; empty: in the run directory."""
    save_every: str = DEFAULT_EVERY
    keep_last: int = KEEP_LAST
    keep_every: int = 0
    keep_best: str = ""
    begin_from: str = ""
    """Weights to begin with; empty: the job's own."""
    profile: str = ""
    """The steps to profile, or "auto"; empty: none."""
    is_away: bool = False
    """This host does not see the run directory; `run_dir` is a folder of its own."""
    resumed: bool = False
    """Go on with the run that is in the run directory."""

    def __post_init__(self) -> None:
        """What can be known before any process is started; the shards are known to the workers only."""
        wish = parse(self.strategy).wish
        if wish is None:
            return
        problem = degrees.problem(wish, self.workers, shards=None)
        if problem:
            raise JobError(problem)
        if self.shares:
            raise JobError(
                f"shares cannot be given with {self.strategy}, in which all groups have equally many shards",
                hint="leave --shares out",
            )

    @property
    def save_plan(self) -> SavePlan | None:
        every = interval(self.save_every)
        if every is None:
            return None
        return SavePlan(self.checkpoint_folder, every[0], self.keep_last, self.keep_every, best(self.keep_best))

    @property
    def save_every_s(self) -> float:
        return (interval(self.save_every) or (0, 0.0))[1]

    @property
    def checkpoint_folder(self) -> str:
        return _anywhere(self.checkpoints) or str(self.run_dir.resolve() / "checkpoints")

    @property
    def origin(self) -> Origin | None:
        """What the run begins from where nobody has its state."""
        folder = self.checkpoint_folder if self.save_plan else ""
        return Origin(folder, self.begin_from, self.resumed) if folder or self.begin_from else None

    @property
    def usable_transport(self) -> str:
        """`auto` stays so only where members can share memory and nobody else can come, or where each has its own state
        anyway."""
        alone = futexflags.supported and (not self.takes_hosts or self.on_accelerators)
        return "gloo" if self.transport == "auto" and not alone else self.transport

    @property
    def on_accelerators(self) -> bool:
        """Whether the run's state is there."""
        return self.device.partition(":")[0] != "cpu" and parse(self.strategy).state_on_device

    @property
    def needs_store(self) -> bool:
        """Whether members may have to meet in torch groups."""
        return self.usable_transport in ("gloo", "nccl") or self.on_accelerators

    @property
    def takes_hosts(self) -> bool:
        """Whether other hosts' agents can take part: where they can reach us."""
        return self.is_open or not is_loopback(self.listen)

    @property
    def in_the_clear(self) -> str:
        """What whoever watches is to know of bytes that travel unencrypted between hosts; empty: none do."""
        if is_loopback(self.listen) or not self.needs_store:
            return ""
        if parse(self.strategy).servers:
            return (
                "parameters and gradients travel encrypted; what workers agree on among themselves (gloo) does not: "
                "use a network that you trust"
            )
        return (
            "gradients travel between hosts over gloo, which encrypts nothing: use a network that you trust, "
            "or --strategy ps:sync, which encrypts them and gives the same weights"
        )

    def run_config(self) -> dict[str, Any]:
        """What the coordinator is told of the run (its RunConfig)."""
        return {
            "workers": self.workers,
            "servers": parse(self.strategy).servers,
            "strategy": self.strategy,
            "local_workers": self.local_workers,
            "local_servers": self.local_servers,
            "takes_hosts": self.takes_hosts and self.transport != "shm",
            "on_accelerators": self.on_accelerators,
            "shares": list(self.shares),
            "transport": self.usable_transport,
            "exact": self.exact,
            "gather_timeout_s": LOADING_S,
            "min_workers": self.min_workers,
            "balance": self.balance and parse(self.strategy).balances,
            "stuck_s": self.stuck_after_s,
            "saves": self.save_plan is not None,
            "save_every_s": self.save_every_s,
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
        """What a worker is told. `address`: the coordinator's; `store`: the rendezvous, where torch groups are used;
        `place`: which of its host's workers it is."""
        return WorkerSpec(
            worker=worker,
            host=host,
            address=self.dial(worker, address),
            credential=credential,
            run_dir=str(self.run_dir),
            strategy=self.strategy,
            threads=self.worker_threads.get(worker, self.threads),
            device=self.device,
            job_file=self.job_file,
            settings=self.settings,
            sys_path=list(self.sys_path),
            store=store,
            shares_memory=self.usable_transport != "gloo",
            most_steps=self.most_steps,
            saves=self.save_plan,
            origin=self.origin,
            place=place,
            profile=profile_plan(self.profile, self.is_away),
        )


def _anywhere(where: str) -> str:
    """A path that means the same wherever the run is resumed from; a URL does anyway."""
    return os.path.abspath(where) if where and "://" not in where else where


def anywhere(launch: Launch) -> Launch:
    """Without what followed from the engine that it was started by."""
    return replace(
        launch,
        on="local",
        shelters=False,
        local_workers=-1,
        local_servers=-1,
        room=-1,
        is_open=False,
        listen=LOOPBACK_ONLY,
        key_file="",
    )


# --- how it is kept for a resume -------------------------------------------------------------------------------------

_FILE = "launch.json"
_OF_ONE_START = ("run_dir", "job_pickle", "dial", "resumed", "host", "is_away")


def keep_launch(launch: Launch) -> None:
    """Write down how the run was started: what `resume` starts it with again."""
    if launch.resumed:
        check_idle(launch.run_dir)
    kept = to_data(launch)
    try:
        replace_file(launch.run_dir / _FILE, msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
    except OSError as error:
        raise DistBeliefError(f"cannot write {launch.run_dir / _FILE}: {error.strerror}") from error


def to_data(launch: Launch) -> dict[str, Any]:
    """What stays the same from one start to the next, and from one host to another."""
    kept = {f.name: getattr(launch, f.name) for f in fields(launch) if f.name not in _OF_ONE_START}
    return kept | {name: _anywhere(kept[name]) for name in ("checkpoints", "begin_from")}


def from_data(run_dir: Path, data: dict[str, Any]) -> Launch:
    types = get_type_hints(Launch)
    known = {name: msgspec.convert(value, types[name], str_keys=True) for name, value in data.items() if name in types}
    return Launch(run_dir=run_dir, **known)


def read_launch(run_dir: Path) -> Launch:
    """How the run in that directory was started."""
    file = run_dir / _FILE
    try:
        return from_data(run_dir, msgspec.json.decode(file.read_bytes(), type=dict[str, Any]))
    except FileNotFoundError:
        raise DistBeliefError(
            f"{run_dir} is no run directory: there is no {_FILE} in it", hint="give the folder that `train` printed"
        ) from None
    except OSError as error:
        raise DistBeliefError(f"cannot read {file}: {error.strerror}") from error
    except (msgspec.MsgspecError, TypeError) as error:
        raise DistBeliefError(f"{file} is damaged: {error}") from error
