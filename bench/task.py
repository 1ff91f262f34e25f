"""What a driver is given, and what it gives back: the whole of what the program and the systems' code have in common.

A task is a folder that the program has made: which workload, how many steps and workers, the data, the weights with
which everybody begins, and which samples are in which step. A driver reads it, trains, and leaves one record per rank.
Only numpy is needed; torch is imported by what says so. It knows no system.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from bench.workloads import Workload

VARIABLE = "BENCH_TASK"
FILE = "task.json"
MEETING_S = 120.0
EVALUATED_AT_ONCE = 500

Array = NDArray[Any]


@dataclass(frozen=True)
class Task:
    workload: str
    workers: int
    steps: int
    warm_up: int
    """So many of the steps are not timed."""
    batch_per_worker: int
    seed: int
    update: dict[str, Any]
    """The optimizer: {"kind": "sgd", "lr": 0.02, "momentum": 0.9, …}"""
    stored: str
    """The folder with the data and the first weights, which many tasks share."""
    evaluate_every: int = 0
    """Steps; 0 for never."""
    meet: bool = False
    """Ranks that share nothing wait for each other after the warm-up, so that they are measured side by side."""
    broken_off: bool = False
    """It will not come to its end: what ranks measure is written down as it comes."""
    folder: str = ""

    @property
    def global_batch(self) -> int:
        return self.batch_per_worker * self.workers

    @staticmethod
    def load(folder: str | None = None) -> Task:
        """The task of this process: $BENCH_TASK names its folder."""
        where = Path(folder or os.environ[VARIABLE])
        return Task(**{**json.loads((where / FILE).read_text()), "folder": str(where)})

    def save(self, folder: Path, order: Array) -> None:
        """`order`: the samples of every step, (steps, global_batch)."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "order.npy", order)
        (folder / FILE).write_text(json.dumps(asdict(self)))

    # What is trained, as arrays.

    def data(self) -> tuple[Array, Array]:
        return self._array("x"), self._array("y")

    def test_data(self) -> tuple[Array, Array]:
        return self._array("test_x"), self._array("test_y")

    def initial(self) -> dict[str, Array]:
        """The first weights, by the names that they have in torch."""
        with np.load(Path(self.stored) / "initial.npz") as content:
            return {name: content[name] for name in content.files}

    def batches(self, rank: int) -> NDArray[np.int64]:
        """The samples of this rank's part of each step's batch: (steps, batch_per_worker)."""
        order: NDArray[np.int64] = np.load(Path(self.folder) / "order.npy")
        return order[:, rank * self.batch_per_worker : (rank + 1) * self.batch_per_worker]

    # The same for torch.

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        x, y = (torch.from_numpy(np.array(one)) for one in self.data())
        return x, y

    def test_tensors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None where nothing is to be evaluated."""
        import torch

        if not self.evaluate_every:
            return None
        x, y = (torch.from_numpy(np.array(one)) for one in self.test_data())
        return x, y

    def model(self) -> torch.nn.Module:
        """A new one, with the first weights in it."""
        import torch

        model = self._workload().model()
        model.load_state_dict({name: torch.from_numpy(value) for name, value in self.initial().items()})
        return model

    def optimizer(self, parameters: Iterable[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        return self._workload().optimizer(parameters, **options)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self._workload().loss(output, target)

    def dataset(self, rank: int) -> torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]:
        """Whose items, taken in order, batch_per_worker at a time, are this rank's batches."""
        import torch

        samples: Any = torch.utils.data.TensorDataset(*self.tensors())
        return torch.utils.data.Subset(samples, self.batches(rank).reshape(-1).tolist())

    def cuts(self, stages: int) -> list[str]:
        """Modules with which the second and later stages of a pipeline begin."""
        return self._workload().cuts(stages)

    def blocks(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The equal parts of which the model is made; empty where it is not."""
        name, count = self._workload().blocks
        return [model.get_submodule(f"{name}.{number}") for number in range(count)]

    # What comes back.

    def record(self, rank: int) -> Record:
        return Record(self, rank)

    def _workload(self) -> Workload:
        from bench.workloads import WORKLOADS

        return WORKLOADS[self.workload]

    def _array(self, name: str) -> Array:
        return np.load(Path(self.stored) / f"{name}.npy", mmap_mode="r")  # type: ignore[no-any-return]


@dataclass
class Record:
    """What one rank has measured."""

    task: Task
    rank: int
    ends: list[float] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    evaluations: list[tuple[float, int, int, int]] = field(default_factory=list)
    """(when it was known, steps done, right, of how many)"""
    _file: IO[str] | None = None

    def step(self, loss: Any, model: Callable[[Any], Any] | None = None, at: float | None = None) -> None:
        """A step has been done just now (or `at`); with `model`, a torch module, accuracy is measured where it is due.

        `loss` is a number, a tensor, or None where this rank has none. A tensor becomes a number at the end only.
        """
        self.losses.append(loss)
        done = len(self.losses)
        if model is not None and self.task.evaluate_every and done % self.task.evaluate_every == 0:
            self._evaluate(model, done)
        if self.task.meet and done == self.task.warm_up:
            self._meet()
        self.ends.append(time.time() if at is None else at)
        if self.task.broken_off:
            if self._file is None:
                self._file = (Path(self.task.folder) / f"rank{self.rank}.ends").open("w", buffering=1)
            self._file.write(f"{self.ends[-1]}\n")

    def done(self, bytes_sent: int | None = None) -> None:
        content = {
            "ends": self.ends,
            "losses": [None if loss is None else float(loss) for loss in self.losses],
            "evaluations": self.evaluations,
            "peak_bytes": peak_bytes(),
            "bytes_sent": bytes_sent,
        }
        file = Path(self.task.folder) / f"rank{self.rank}.json"
        file.with_suffix(".part").write_text(json.dumps(content))
        file.with_suffix(".part").rename(file)

    def _evaluate(self, model: Callable[[Any], Any], done: int) -> None:
        """Every rank looks at its part of the test set; as many samples at each, so that all call the model alike."""
        import torch

        found = self.task.test_tensors()
        assert found is not None
        each = len(found[0]) // self.task.workers
        samples, wanted = (part[self.rank * each : (self.rank + 1) * each] for part in found)
        right = 0
        assert isinstance(model, torch.nn.Module)
        training = model.training
        model.eval()
        with torch.no_grad():
            for first in range(0, each, EVALUATED_AT_ONCE):
                some = slice(first, first + EVALUATED_AT_ONCE)
                right += int((model(samples[some]).argmax(1) == wanted[some]).sum())
        model.train(training)
        self.evaluations.append((time.time(), done, right, each))

    def _meet(self) -> None:
        folder = Path(self.task.folder)
        (folder / f"ready{self.rank}").touch()
        deadline = time.monotonic() + MEETING_S
        while not all((folder / f"ready{rank}").exists() for rank in range(self.task.workers)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waited {MEETING_S:.0f} s for the others")
            time.sleep(0.001)


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory that a process has had, shared memory included: the kernel's VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
