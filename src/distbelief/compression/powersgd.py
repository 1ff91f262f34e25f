"""PowerSGD: members sum gradient matrices as products of two thin matrices (Vogels et al. 2019).

A matrix M (n × m) is multiplied by Q (m × r), the products are summed over members and made orthonormal: P. Then Mᵀ P
is summed, which gives the new Q. P Qᵀ approximates the sum of all M in r directions. The next step starts with this Q,
so the directions follow the gradient (one step of a power iteration each time). The rest of a member's own M, outside
the span of P, is its residual and is added to its next gradient. Vectors and small matrices are summed uncompressed.

The factors are stored as rows (Pᵀ, Qᵀ), because BLAS multiplies thin matrices three to twenty times faster that way.
After a sum all members have the same bits; members with the same memory layout compute the same results from them.
Matrices may be on a device. The factors are summed and made orthonormal on the host: the network reads host memory, and
the host is faster for matrices this thin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distbelief.compression.option import Option, checked_rank
from distbelief.errors import DistBeliefError

AllSum = Callable[[Tensor], Tensor]
"""Sums a flat float32 vector on the host over all members, with the same bits for all. The function may overwrite its
argument.
"""

_ALIGNED = 16  # elements: BLAS may round differently at other alignments, so every matrix begins at a cache line
_LOST = 1e-6  # relative strength below which a direction is rounding error


@dataclass(frozen=True)
class LowRank:
    """PowerSGD as an option. A higher rank sends more bytes and has a smaller error."""

    rank: int = 4

    def __post_init__(self) -> None:
        checked_rank(self.rank)

    def __str__(self) -> str:
        return str(Option("powersgd", self.rank))

    def over(self, shapes: Sequence[Sequence[int]], seed: int, device: torch.device | None = None) -> PowerSGD:
        return PowerSGD(shapes, self.rank, seed, device)


@dataclass(frozen=True)
class _Matrix:
    """One compressed parameter, and the slices of its factors in the vectors that are summed."""

    at: int
    rows: int
    columns: int
    rank: int
    left: slice
    right: slice


class PowerSGD:
    """Sums lists of gradients of fixed shapes. All members must pass the same shapes, rank and seed."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], rank: int, seed: int, device: torch.device | None = None
    ) -> None:
        """`device`: where the gradients are; None: on the host. The factors are summed on the host in both cases."""
        self._shapes = [torch.Size(shape) for shape in shapes]
        self._matrices: list[_Matrix] = []
        lefts = rights = 0
        for at, shape in enumerate(self._shapes):
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (0, 0)
            thin = min(rank, rows, columns)
            if 2 * thin * (rows + columns) <= rows * columns and rows * columns > 0:
                left, right = slice(lefts, lefts + rows * thin), slice(rights, rights + columns * thin)
                self._matrices.append(_Matrix(at, rows, columns, thin, left, right))
                lefts, rights = _aligned(left.stop), _aligned(right.stop)
        self._whole = sorted(set(range(len(self._shapes))) - {matrix.at for matrix in self._matrices})
        self._offset = lefts
        self._lefts = torch.zeros(lefts + sum(self._shapes[at].numel() for at in self._whole), device=device)
        self._rights = torch.zeros(rights, device=device)
        self._travelling = [_on_host(vector, device) for vector in (self._lefts, self._rights)]
        """Both factors in host memory, for the sums over members."""
        self._starts = [_start(seed, matrix).to(device) for matrix in self._matrices]
        self._queries = [start.clone() for start in self._starts]
        self._residuals = [torch.zeros(matrix.rows, matrix.columns, device=device) for matrix in self._matrices]
        self._sums = [torch.zeros(shape, device=device) for shape in self._shapes]

    @property
    def size_bytes(self) -> int:
        """Bytes that one member contributes to the sums of one `reduce`."""
        return 4 * (self._lefts.numel() + self._rights.numel())

    @property
    def ratio(self) -> float:
        """The size of the gradients divided by the size of the factors."""
        return 4 * sum(shape.numel() for shape in self._shapes) / self.size_bytes if self.size_bytes else 1.0

    @torch.no_grad()
    def reduce(self, gradients: Sequence[Tensor], all_sum: AllSum) -> list[Tensor]:
        """Approximate sums of the gradients over all members. The next call overwrites them."""
        self._check(gradients)
        for matrix, residual, query in zip(self._matrices, self._residuals, self._queries, strict=True):
            residual.add_(gradients[matrix.at].reshape(matrix.rows, matrix.columns))
            torch.mm(query, residual.T, out=_left(self._lefts, matrix))
        self._pack(gradients)
        lefts, rights = self._travelling
        _replace(lefts, self._lefts)
        _replace(lefts, all_sum(lefts))
        for matrix in self._matrices:
            left = _left(lefts, matrix)
            left.copy_(orthonormal(left))
        _replace(self._lefts, lefts)
        self._unpack()
        for matrix, residual in zip(self._matrices, self._residuals, strict=True):
            torch.mm(_left(self._lefts, matrix), residual, out=_right(self._rights, matrix))
        mine = self._rights.clone()
        if self._matrices:
            _replace(rights, self._rights)
            _replace(rights, all_sum(rights))
            _replace(self._rights, rights)
        for i, matrix in enumerate(self._matrices):
            left, right = _left(self._lefts, matrix), _right(self._rights, matrix)
            torch.mm(left.T, right, out=self._sums[matrix.at].view(matrix.rows, matrix.columns))
            self._residuals[i].addmm_(left.T, _right(mine, matrix), alpha=-1)
            if not bool(_right(rights, matrix).isfinite().all()):
                self._residuals[i].zero_()  # the sum already shows the NaN; later steps must not inherit it
            self._queries[i].copy_(_directions(right, self._starts[i]))
        return self._sums

    @property
    def compressed(self) -> dict[int, tuple[int, int]]:
        """Index of each compressed gradient -> the shape of its query."""
        return {matrix.at: (matrix.rank, matrix.columns) for matrix in self._matrices}

    @property
    def starts(self) -> list[Tensor]:
        """The queries at the start of a run."""
        return self._starts

    def keep_in(self, residuals: Sequence[Tensor], queries: Sequence[Tensor]) -> None:
        """Use this memory, one tensor per compressed gradient, as the state from now on; its present values are the
        state."""
        self._residuals = [r.view(m.rows, m.columns) for r, m in zip(residuals, self._matrices, strict=True)]
        self._queries = list(queries)

    def _check(self, gradients: Sequence[Tensor]) -> None:
        given = [gradient.shape for gradient in gradients]
        if given != self._shapes:
            raise DistBeliefError(
                f"PowerSGD was made for gradients of shapes {[list(s) for s in self._shapes]}, and was given"
                f" {[list(s) for s in given]}"
            )
        for gradient in gradients:
            if gradient.dtype != torch.float32 or gradient.device.type != self._lefts.device.type:
                raise DistBeliefError(
                    f"PowerSGD takes float32 gradients on {self._lefts.device} here, not {gradient.dtype} on"
                    f" {gradient.device}",
                    hint="copy the gradients to float32 on that device first, or send them uncompressed",
                )

    def _pack(self, gradients: Sequence[Tensor]) -> None:
        """Copy the uncompressed gradients behind the left factors, so that one `reduce` needs two sums only."""
        start = self._offset
        for at in self._whole:
            stop = start + self._shapes[at].numel()
            self._lefts[start:stop].copy_(gradients[at].reshape(-1))
            start = stop

    def _unpack(self) -> None:
        start = self._offset
        for at in self._whole:
            stop = start + self._shapes[at].numel()
            self._sums[at].view(-1).copy_(self._lefts[start:stop])
            start = stop


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal rows with the same span as the matrix's rows; linearly dependent or zero rows are replaced by other
    directions (Householder's QR does this). Returns NaN if the matrix is not finite.

    >>> orthonormal(torch.zeros(2, 3)).abs().tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, torch.nan)
    columns: Tensor = torch.linalg.qr(matrix.T).Q
    return columns.T


def _directions(right: Tensor, start: Tensor) -> Tensor:
    """The rows scaled to length one, as the next step's query. A vanished direction (after a zero gradient, for
    example) would stay zero for ever, so it is replaced by its start value."""
    lengths = torch.linalg.vector_norm(right, dim=1, keepdim=True)
    kept = lengths.isfinite() & (lengths > _LOST * lengths.amax()) & (lengths > torch.finfo(torch.float32).tiny)
    return torch.where(kept, right / lengths.where(kept, 1.0), start)


def _start(seed: int, matrix: _Matrix) -> Tensor:
    random = torch.Generator().manual_seed((seed * 1_000_003 + matrix.at) % 2**63)
    start = torch.randn(matrix.rank, matrix.columns, generator=random)
    return start.div_(torch.linalg.vector_norm(start, dim=1, keepdim=True))


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


def _left(vector: Tensor, matrix: _Matrix) -> Tensor:
    return vector[matrix.left].view(matrix.rank, matrix.rows)


def _right(vector: Tensor, matrix: _Matrix) -> Tensor:
    return vector[matrix.right].view(matrix.rank, matrix.columns)


def _on_host(vector: Tensor, device: torch.device | None) -> Tensor:
    """A host vector of the same length: the vector itself if it is on the host already."""
    return vector if device is None else torch.zeros(vector.numel(), pin_memory=device.type == "cuda")


def _replace(mine: Tensor, summed: Tensor) -> None:
    """Copy the sum into this member's own memory, which has the same alignment on all members."""
    if summed is not mine:
        mine.copy_(summed)
