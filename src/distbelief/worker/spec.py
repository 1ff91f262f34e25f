"""The options with which a worker or parameter server starts. Torch-free, because the launching process makes them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from distbelief.control.credentials import Credential
from distbelief.options import ProfilePlan, RunOptions, SavePlan, profile_plan


class JobSource(msgspec.Struct, frozen=True, rename={"file": "job_file"}):
    """Where a worker finds the job: in a job file, or pickled."""

    file: str = ""
    """The job file. Empty: the job is pickled in the shared segment "job"."""
    settings: dict[str, str] = {}
    """The user's hyper-parameters (--set)."""
    sys_path: tuple[str, ...] = ()
    pickled: bytes = b""
    """The pickled job; only in the launching process and on its way to other hosts."""


class Origin(msgspec.Struct, frozen=True):
    """The checkpoint or the weights with which a run begins, instead of the job's initial values."""

    checkpoints: str = ""
    """The run's checkpoint folder. If no member has the run's state, the run starts from the newest usable
    checkpoint."""
    weights: str = ""
    """Trained weights for the start, if there is no checkpoint."""
    resumed: bool = False
    """Whether this run is resumed; otherwise its first generation looks for no checkpoint."""
    run_id: str = ""
    """This run's random id. The worker does not use checkpoints that have another run's id."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """All options of a worker. They never appear in `ps` or in the environment."""

    worker: int
    host: str
    address: str
    credential: Credential
    run_dir: str
    options: RunOptions
    """The run's options; `threads` and `device` are this worker's where they differ."""
    job: JobSource = JobSource()
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store; empty where no torch groups are used."""
    shares_memory: bool = True
    """Whether all workers and parameter servers of the run are on one host."""
    place: int = 0
    """The worker's index on its host: the smallest free one."""
    resumed: bool = False
    is_away: bool = False
    """Whether this host cannot see the run's directory; `run_dir` is then a local folder."""
    plugin: str = ""
    """The distribution of a plug-in strategy; empty for DistBelief's own."""
    run_id: str = ""
    """Written into every checkpoint of the run."""

    @property
    def checkpoint_folder(self) -> str:
        return checkpoint_folder(self.options, Path(self.run_dir))

    @property
    def saves(self) -> SavePlan | None:
        return self.options.save_plan(self.checkpoint_folder)

    @property
    def origin(self) -> Origin | None:
        """The run's start if no member has its state. None: the job's initial values."""
        folder = self.checkpoint_folder if self.options.saves else ""
        weights = self.options.begin_from
        return Origin(folder, weights, self.resumed, self.run_id) if folder or weights else None

    @property
    def profile(self) -> ProfilePlan | None:
        return profile_plan(self.options.profile, self.is_away)


def checkpoint_folder(options: RunOptions, run_dir: Path) -> str:
    """The folder or URL of the run's checkpoints."""
    return options.with_absolute_paths().checkpoints or str(run_dir.resolve() / "checkpoints")
