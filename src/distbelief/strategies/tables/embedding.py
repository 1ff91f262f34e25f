"""EmbeddingTable: a table of rows that a model looks up by number, and that may be larger than any memory.

With the strategy `ps` the rows lie on servers, which store only rows that were changed. A forward pass pulls the rows
of its batch, and the table collects the gradients of these rows, which the replica pushes. With every other strategy
the table is an ordinary parameter. The first values are the same in both forms (rowinit.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from distbelief.errors import JobError
from distbelief.strategies.tables.rowgradients import RowGradients, added_rows
from distbelief.strategies.tables.rowinit import RowInit, TableForm
from distbelief.transport.shm.memfd import free_memory_bytes

if TYPE_CHECKING:
    from distbelief.job import OptimizerFactory

Init = str | tuple[str, float]
Source = Callable[[NDArray[np.int64], bool], NDArray[np.float32]]
"""(rows, each once and ascending; whether gradients are wanted) -> their values, in memory that the caller may keep."""
BLOCK_ROWS = 1 << 16

_on_servers: ContextVar[bool] = ContextVar("tables on servers", default=False)


class EmbeddingTable(nn.Module):
    """`rows` rows of `width` numbers, used as torch.nn.Embedding is: numbers of rows in, rows out.

    init: "zeros", or ("normal", standard deviation), or ("uniform", bound). A row's first values are a function of its
    number and of torch's seed, so nothing is stored for a row before it has learnt something.

    optimizer: as in `Job`, for this table alone, where the job's own cannot be used row by row (`ps` only).

    >>> _ = torch.manual_seed(0)
    >>> table = EmbeddingTable(1000, 4, init=("uniform", 0.1))
    >>> table(torch.tensor([[3, 5], [5, 3]])).shape
    torch.Size([2, 2, 4])
    >>> table
    EmbeddingTable(rows=1000, width=4)
    """

    weight: nn.Parameter | None

    def __init__(
        self, rows: int, width: int, init: Init = ("normal", 0.01), optimizer: OptimizerFactory | None = None
    ) -> None:
        super().__init__()
        begin = RowInit(init) if isinstance(init, str) else RowInit(*init)
        # From torch's generator, as other modules draw their first values: each table gets another seed.
        self.form = TableForm("", rows, width, begin, seed=int(torch.randint(1 << 62, (1,))))
        self.optimizer = optimizer
        self._source: Source | None = None
        """None: all rows have their first values."""
        self._brought: list[tuple[NDArray[np.int64], torch.Tensor]] = []
        self.register_parameter("weight", None if _on_servers.get() else nn.Parameter(_all_rows(self.form)))

    @property
    def rows(self) -> int:
        return self.form.rows

    @property
    def width(self) -> int:
        return self.form.width

    @property
    def is_served(self) -> bool:
        """Whether the rows lie on servers."""
        return self.weight is None

    def extra_repr(self) -> str:
        return f"rows={self.rows}, width={self.width}"

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            return F.embedding(numbers, self.weight)
        if numbers.dtype not in (torch.int64, torch.int32):
            raise JobError(f"an EmbeddingTable was asked for rows by {numbers.dtype} numbers", hint="use int64")
        rows, places = np.unique(numbers.cpu().numpy(), return_inverse=True)
        if rows.size and (rows[0] < 0 or rows[-1] >= self.rows):
            raise JobError(
                f"an EmbeddingTable of {self.rows:,} rows was asked for row {rows[0] if rows[0] < 0 else rows[-1]:,}",
                hint="declare it with more rows, or bring the numbers into its range (e.g. by a hash)",
            )
        rows = rows.astype(np.int64, copy=False)
        learning = torch.is_grad_enabled()
        values = torch.from_numpy(self._source(rows, learning) if self._source else self.form.initial(rows))
        values = values.to(numbers.device)
        if learning:
            values.requires_grad_()
            self._brought.append((rows, values))
        return F.embedding(torch.from_numpy(places).view(numbers.shape).to(numbers.device), values)

    def requires_grad_(self, requires_grad: bool = True) -> EmbeddingTable:
        if self.is_served and not requires_grad:
            raise JobError(
                "an EmbeddingTable whose rows are on parameter servers cannot be frozen",
                hint="use nn.Embedding for a table that does not learn",
            )
        return super().requires_grad_(requires_grad)

    # --- for strategies ----------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Drop the rows: they lie on servers from now on."""
        self.weight = None

    def served_by(self, source: Source) -> None:
        """Pull rows from this source from now on."""
        self._source = source

    def forget(self) -> None:
        """Forget the rows that were pulled before: their gradients are not wanted."""
        self._brought.clear()

    def gradients(self) -> RowGradients:
        """The gradients of all rows that were pulled since the last call."""
        found = [RowGradients(rows, leaf.grad.cpu().numpy()) for rows, leaf in self._brought if leaf.grad is not None]
        self._brought.clear()
        none = RowGradients(np.zeros(0, np.int64), np.zeros((0, self.width), np.float32))
        return added_rows(found or [none])


def tables_of(model: nn.Module) -> list[tuple[str, EmbeddingTable]]:
    """The tables of a model whose rows lie on servers, with their names; a shared table once."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, EmbeddingTable)]
    return [(name, table) for name, table in found if table.is_served]


@contextlib.contextmanager
def on_servers() -> Iterator[None]:
    """Tables of models that are made in this block hold no rows: these lie on servers."""
    token = _on_servers.set(True)
    try:
        yield
    finally:
        _on_servers.reset(token)


def settle(model: nn.Module) -> None:
    """Bring the tables of a finished model into the form that the strategy wants, or refuse them."""
    for name, module in model.named_modules():
        if not isinstance(module, EmbeddingTable):
            continue
        if _on_servers.get():
            module.let_go()  # the model was made before the block
        elif module.optimizer is not None:
            raise JobError(
                f"the table '{name}' has an optimizer of its own, which only parameter servers can give it",
                hint="use --strategy ps, or leave `optimizer` out: then the job's is used",
            )


def densified(model: nn.Module, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Turn weights with rows and values of tables (`NAME.rows`) into weights for a model in which the tables are
    parameters. Missing rows have their first values, which the model was just made with."""
    found = dict(tensors)
    for name in tables_in_rows(model, tensors, prefix):
        table = model.get_submodule(name)
        assert isinstance(table, EmbeddingTable)
        assert table.weight is not None
        whole = table.weight.detach().clone()
        rows = found.pop(f"{prefix}{name}.rows")
        whole[rows] = found.pop(f"{prefix}{name}.values")
        found[f"{prefix}{name}.weight"] = whole
    return found


def tables_in_rows(model: nn.Module, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> list[str]:
    """The tables that are parameters of this model, but rows and values in these tensors."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, EmbeddingTable) and not module.is_served and f"{prefix}{name}.rows" in tensors
    ]


def _all_rows(form: TableForm) -> torch.Tensor:
    size_bytes, free_bytes = 4 * form.rows * form.width, free_memory_bytes()
    if size_bytes > free_bytes:
        raise JobError(
            f"a table of {form.rows:,} × {form.width} numbers takes {size_bytes / 2**30:.1f} GiB, and "
            f"{max(free_bytes, 0) / 2**30:.1f} GiB are free",
            hint="use --strategy ps, where only rows that have learnt something take memory (and give the job a "
            "function that makes its model, not a model)",
        )
    values = torch.empty(form.rows, form.width)
    for first in range(0, form.rows, BLOCK_ROWS):
        end = min(first + BLOCK_ROWS, form.rows)
        values[first:end] = torch.from_numpy(form.initial(np.arange(first, end)))
    return values
