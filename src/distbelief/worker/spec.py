"""What a worker process is told when it starts. Without torch: the engine makes it, the zygote passes it on."""

from __future__ import annotations

import msgspec


class WorkerSpec(msgspec.Struct, frozen=True):
    """Everything a worker process is told when it starts. It never appears in `ps` or in the environment."""

    worker: int
    host: str
    address: str
    secret: str
    run_dir: str
    strategy: str
    threads: int
    device: str
    job_file: str = ""
    """Empty: the job is pickled in the keeper's segment "job"."""
    settings: dict[str, str] = {}
    sys_path: list[str] = []
    store: tuple[str, int] | None = None
    """Host and port of the rendezvous store, where torch groups are used."""
    most_steps: int = 0
    """End the run after so many steps, if the job has more; 0: no limit."""
