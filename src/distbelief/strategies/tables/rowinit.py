"""The form of a sparse table, and the initial values of its rows.

The initial values of a row are a pure function of the seed, the table's name and the row's number. So every server
computes the same values at any time, and nothing is stored for a row that was never changed.

Only operations that IEEE 754 rounds correctly are used (+ − × ÷ and square root, one at a time), not log or cos of
a library: the same bits on every processor.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distbelief.errors import JobError

KINDS = ("normal", "uniform", "zeros")
_LN2 = np.float32(math.log(2.0))
_SQRT2 = np.float32(math.sqrt(2.0))
_SQRT_HALF = np.float32(math.sqrt(0.5))
# M. Giles, "Approximating the erfinv function" (2010), single precision: erfinv(x) = x·p(w), w = -ln(1 - x²).
# p is the first polynomial in w - 2.5 where w < 5, and the second in √w - 3 elsewhere.
# fmt: off
_CENTRE = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
           -0.00417768164, 0.246640727, 1.50140941)
_TAIL = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
         0.00943887047, 1.00167406, 2.83297682)
# fmt: on


class RowInit(Struct, frozen=True):
    """The distribution of initial values: normal with mean 0 and standard deviation `scale`, uniform between
    -`scale` and `scale`, or zeros.

    >>> RowInit("uniform", 0.05)
    RowInit(kind='uniform', scale=0.05)
    """

    kind: str = "normal"
    scale: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise JobError(f"a table's rows cannot begin as {self.kind!r}", hint=f"one of {', '.join(KINDS)}")
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise JobError(f"the scale of a table's initial values is {self.scale}", hint="a number of 0 or more")


class TableForm(Struct, frozen=True):
    """A sparse table without its rows.

    >>> form = TableForm("users", rows=50_000_000, width=16)
    >>> form.initial(np.array([7, 49_999_999, 7])).shape
    (3, 16)
    """

    name: str
    rows: int
    width: int
    init: RowInit = RowInit()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.width < 1:
            raise JobError(
                f"table '{self.name}' has {self.rows} rows of {self.width} numbers", hint="at least 1 of each"
            )

    def initial(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The initial values of these rows."""
        if self.init.kind == "zeros" or self.init.scale == 0:
            return np.zeros((rows.shape[0], self.width), np.float32)
        values = _signed(_key(self.seed, self.name), rows, self.width)
        if self.init.kind == "normal":
            values = _normal(values)
        values *= np.float32(self.init.scale)
        return values


def mixed(numbers: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 well-mixed bits of every number (splitmix64): a bijection, so different numbers never give the same bits.

    >>> mixed(np.array([0, 1])).tolist()
    [16294208416658607535, 10451216379200822465]
    """
    bits = numbers.astype(np.uint64)  # a copy: what follows is in place
    bits += np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


@lru_cache(maxsize=1024)
def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8, person=b"sparse table").digest()
    return int.from_bytes(digest, "little")


def _signed(key: int, rows: NDArray[np.int64], width: int) -> NDArray[np.float32]:
    """Uniform numbers, odd multiples of 2⁻²⁴ between -1 and 1: 24 bits of a hash of (key, row, column) each."""
    of_rows = mixed(mixed(rows) ^ np.uint64(key))
    of_pairs = np.arange((width + 1) // 2, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    words = mixed(of_rows[:, None] ^ of_pairs).astype("<u8").view("<u4")[:, :width]  # low half first, on any processor
    whole = (words >> np.uint32(8)).astype(np.int32)
    return (2 * whole - (2**24 - 1)).astype(np.float32) * np.float32(2.0**-24)


def _normal(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """√2·erfinv(x): standard normal numbers from uniform ones between -1 and 1."""
    w = _minus_log((1 - x) * (1 + x))
    p = _polynomial(_CENTRE, w - np.float32(2.5))
    tail = np.flatnonzero(w >= 5)
    p.reshape(-1)[tail] = _polynomial(_TAIL, np.sqrt(w.reshape(-1)[tail]) - np.float32(3))
    p *= x
    p *= _SQRT2
    return p


def _minus_log(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """-ln(x) = -e·ln 2 - 2·artanh(s) with x = m·2ᵉ, m in [√½, √2) and s = (m - 1)/(m + 1), so |s| < 0.172."""
    bits = x.view(np.int32) - _SQRT_HALF.view(np.int32)  # of numbers above 0: the exponent is above bit 23
    exponent = bits >> 23
    m = (x.view(np.int32) - (exponent << 23)).view(np.float32)
    s = (m - 1) / (m + 1)
    series = _polynomial((2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0), s * s)
    series *= s
    return -(exponent.astype(np.float32) * _LN2 + series)


def _polynomial(coefficients: tuple[float, ...], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Horner's rule, highest power first."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += np.float32(coefficient)
    return result
