"""Job: the description of a training job. A plain value, independent of workers, strategies and engines."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from distbelief.errors import JobError, StepCodeError
from distbelief.shards import default_shards

if TYPE_CHECKING:
    import torch

    LossValue = torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]
    OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

Precision = Literal["fp32", "bf16"]
Matmul = Literal["torch", "onednn"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job, the same for one process or a thousand.

    A batch of `data` is split into what the model gets and what the loss compares with: (x, y) calls
    `loss(model(x), y)`; (a, b, …, y) calls `loss(model(a, b, …), y)`; a mapping calls `loss(model(**batch), batch)`.

    >>> import torch
    >>> from distbelief import Job
    >>> job = Job(
    ...     model=lambda: torch.nn.Linear(4, 2),
    ...     loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ...     data=(torch.randn(100, 4), torch.randint(0, 2, (100,))),
    ...     global_batch=20,
    ...     epochs=2,
    ... )
    >>> job.resolved_shards
    4
    """

    model: Callable[[], torch.nn.Module] | torch.nn.Module
    """A function that makes the model (called under the job's seed), or the model itself."""
    loss: Callable[[Any, Any], LossValue]
    """(output, target) -> the mean over the samples; or (sum, weight) where padding makes the true weight differ."""
    optimizer: OptimizerFactory
    """Trainable parameters -> a torch optimizer. Parameter groups may be chosen by shape (e.g. `p.ndim`)."""
    data: Any
    """Tensors or arrays (one, a tuple, or a mapping), a map-style Dataset, or what `distbelief.idx` reads."""
    global_batch: int
    """Samples per step, over all workers."""
    steps: int | None = None
    epochs: float | None = None
    shards: int | None = None
    """V, the number of units of work per step; constant for the whole run. Default: derived from `global_batch`
    alone."""
    seed: int = 0
    schedule: Callable[[int], float] | None = None
    """Step -> factor on every parameter group's learning rate."""
    clip_norm: float | None = None
    """Largest global norm of the gradient."""
    after_update: Mapping[str, Callable[[torch.Tensor], object]] = field(default_factory=dict)
    """Pattern of parameter names (`critic.*`) -> function of one whole parameter, which changes it in place or returns
    its new value. Applied after every update, to the parameters that the optimizer has updated. It must be pure."""
    precision: Precision = "fp32"
    """"bf16" runs forward and loss under autocast."""
    matmul: Matmul = "torch"
    """With "onednn", linear layers on processors multiply with oneDNN: much faster on AMD, with other last bits than
    torch."""
    compile: bool = False
    """Run the model through torch.compile. The first step of every worker waits for the compiler."""
    validation: Any = None
    """Data to evaluate on, in any form that `data` may have."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Name -> function (output, target) -> (sum, weight), or a torchmetrics Metric. Mean loss is always there."""
    evaluate_every: int | None = None
    """Steps between evaluations; with validation data, the last step is always followed by one."""
    collate: Callable[[Sequence[Any]], Any] | None = None
    """Samples of a Dataset, as a list -> a batch. Default: torch's. Tensors in memory are not collated: with them it is
    an error."""
    validation_collate: Callable[[Sequence[Any]], Any] | None = None
    """The same for `validation`. Default: `collate`, if `validation` is a Dataset too."""
    readers: int = 1
    """Reader processes per worker for a Dataset. In-memory tensors need none."""
    shuffle: bool = True
    drop_last: bool = False
    name: str = ""
    split: Sequence[str] = ()
    """For pipelines whose model cannot be cut automatically: names of modules, each of which may begin a stage."""
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    """For tensor parallelism: pattern of module names -> column, row or whole. These entries override the plan."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise JobError(f"Job: {problem}")

    @property
    def resolved_shards(self) -> int:
        return self.shards or default_shards(self.global_batch)

    def rate_factor(self, step: int) -> float:
        """The factor on every learning rate in a step."""
        if self.schedule is None:
            return 1.0
        try:
            factor = self.schedule(step)
            is_finite = math.isfinite(factor)
        except Exception as error:
            raise StepCodeError("`schedule` failed", step, error) from error
        if not is_finite:
            raise StepCodeError(f"`schedule` returned {factor}", step)
        return factor

    def clip_factor(self, norm: float) -> float:
        """The factor on all gradients of a step whose global norm is `norm`.

        It is rounded to float32: the last bits of a norm depend on how a strategy cuts the gradients into tiles, and
        would reach parameters of type float64.
        """
        if self.clip_norm is None:
            return 1.0
        factor: float = struct.unpack("f", struct.pack("f", min(1.0, self.clip_norm / (norm + 1e-6))))[0]
        return factor

    def _problem(self) -> str:
        for name in ("loss", "optimizer", "model"):
            if not callable(getattr(self, name)):
                return f"`{name}` must be callable, not {type(getattr(self, name)).__name__}"
        if self.data is None:
            return "`data` is missing"
        for name in ("global_batch", "shards", "steps", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                return f"`{name}` must be a whole number of at least 1, not {value!r}"
        if (self.steps is None) == (self.epochs is None):
            return "give either `steps` or `epochs`, and not both"
        if self.epochs is not None and not (isinstance(self.epochs, int | float) and 0 < self.epochs < float("inf")):
            return f"`epochs` must be a number above 0, not {self.epochs!r}"
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            return f"`seed` must be a whole number from 0 to 2**63 - 1, not {self.seed!r}"
        if self.schedule is not None and not callable(self.schedule):
            return f"`schedule` must be a function of the step, not {type(self.schedule).__name__}"
        if self.resolved_shards > self.global_batch:
            return f"{self.resolved_shards} shards are more than the {self.global_batch} samples of a global batch"
        if self.precision not in ("fp32", "bf16"):
            return f"`precision` is fp32 or bf16, not {self.precision!r}"
        if self.matmul not in ("torch", "onednn"):
            return f"`matmul` is torch or onednn, not {self.matmul!r}"
        if self.matmul == "onednn" and self.compile:
            return '`compile` and `matmul="onednn"` do not go together: leave one of them out'
        if self.clip_norm is not None and not self.clip_norm > 0:
            return f"`clip_norm` must be above 0, not {self.clip_norm!r}"
        for name in ("collate", "validation_collate"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                return f"`{name}` must be a function of a list of samples, not {type(getattr(self, name)).__name__}"
        if self.validation_collate is not None and self.validation is None:
            return "`validation_collate` is given, and `validation` is missing"
        after_update: object = self.after_update
        if not isinstance(after_update, Mapping) or not all(
            isinstance(pattern, str) and callable(function) for pattern, function in after_update.items()
        ):
            return (
                "`after_update` must map patterns of parameter names to functions of a parameter, for example "
                '{"critic.*": lambda p: p.clamp_(-0.01, 0.01)}'
            )
        if self.readers < 1:
            return f"`readers` must be at least 1, not {self.readers}"
        return ""
