"""What a worker process is told when it starts. Without torch: the engine makes it, the zygote passes it on."""

from __future__ import annotations

import msgspec

from distbelief.control.credentials import Credential


class SavePlan(msgspec.Struct, frozen=True):
    """Where checkpoints go, which are taken without being asked for, and which are kept."""

    folder: str
    every_steps: int = 0
    """0: only the last one, and those that are asked for."""
    keep_last: int = 3
    keep_every: int = 0
    """Those whose step is a multiple of it; 0: none of them for that reason."""
    keep_best: tuple[str, bool] | None = None
    """A metric, and whether higher is better."""


class Origin(msgspec.Struct, frozen=True):
    """What a run begins from, instead of the job's own initial values."""

    checkpoints: str = ""
    """The folder of this run's checkpoints: where nobody has its state, it goes on from the newest sound one."""
    weights: str = ""
    """Where there is no checkpoint: trained weights."""
    resumed: bool = False
    """It has run before; else its first generation has no checkpoint to look for."""


class ProfilePlan(msgspec.Struct, frozen=True):
    """The steps whose time is recorded: from `first` to before `end`; `end` 0: some after the first ones."""

    first: int
    end: int
    is_sent: bool = False
    """Whether what was recorded goes to the coordinator: this host does not see the run directory."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """Everything a worker process is told when it starts. It never appears in `ps` or in the environment."""

    worker: int
    host: str
    address: str
    credential: Credential
    run_dir: str
    strategy: str
    threads: int
    device: str
    job_file: str = ""
    """Empty: the job is pickled in the segments's segment "job"."""
    settings: dict[str, str] = {}
    sys_path: list[str] = []
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store, where torch groups are used."""
    most_steps: int = 0
    """End the run after so many steps, if the job has more; 0: no limit."""
    shares_memory: bool = True
    """Whether all workers and parameter servers of the run are on one host."""
    saves: SavePlan | None = None
    origin: Origin | None = None
    place: int = 0
    """Among the workers of its host: the smallest number that none of the others has."""
    profile: ProfilePlan | None = None
