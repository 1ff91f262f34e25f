"""What a worker or parameter-server process is told when it starts. Torch-free: the launching process makes it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from distbelief.control.credentials import Credential
from distbelief.options import ProfilePlan, RunOptions, SavePlan, profile_plan


class JobSource(msgspec.Struct, frozen=True, rename={"file": "job_file"}):
    """Where a worker finds the job: in a file, or pickled."""

    file: str = ""
    """The job file. Empty: the job is pickled; workers find it in the shared segment "job"."""
    settings: dict[str, str] = {}
    """The hyper-parameters that the user has set (--set)."""
    sys_path: tuple[str, ...] = ()
    pickled: bytes = b""
    """In the launching process and on its way to other hosts only."""


class Origin(msgspec.Struct, frozen=True):
    """What a run begins from, instead of the job's own initial values."""

    checkpoints: str = ""
    """The folder of this run's checkpoints. If no member has the run's state, it starts from the newest sound one."""
    weights: str = ""
    """Trained weights to begin with if there is no checkpoint."""
    resumed: bool = False
    """Whether the run has run before; otherwise its first generation looks for no checkpoint."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """Everything a worker is told when it starts. It never appears in `ps` or in the environment."""

    worker: int
    host: str
    address: str
    credential: Credential
    run_dir: str
    options: RunOptions
    """The run's; `threads` and `device` are this worker's own where they differ."""
    job: JobSource = JobSource()
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store, where torch groups are used."""
    shares_memory: bool = True
    """Whether all workers and parameter servers of the run are on one host."""
    place: int = 0
    """The worker's index among the workers of its host: the smallest one that is free."""
    resumed: bool = False
    is_away: bool = False
    """Whether this host does not see the run directory of the run; `run_dir` is then a folder of the host's own."""
    plugin: str = ""
    """The distribution that has the strategy, if it is not DistBelief."""

    @property
    def checkpoint_folder(self) -> str:
        return checkpoint_folder(self.options, Path(self.run_dir))

    @property
    def saves(self) -> SavePlan | None:
        return self.options.save_plan(self.checkpoint_folder)

    @property
    def origin(self) -> Origin | None:
        """What the run begins from if no member has its state. None: the job's initial values."""
        folder = self.checkpoint_folder if self.options.saves else ""
        weights = self.options.begin_from
        return Origin(folder, weights, self.resumed) if folder or weights else None

    @property
    def profile(self) -> ProfilePlan | None:
        return profile_plan(self.options.profile, self.is_away)


def checkpoint_folder(options: RunOptions, run_dir: Path) -> str:
    """A folder or URL."""
    return options.with_absolute_paths().checkpoints or str(run_dir.resolve() / "checkpoints")
