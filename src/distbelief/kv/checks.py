"""Checks of the arguments that a caller gives to a `Store`: they raise errors in plain words. No sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distbelief.errors import DistBeliefError
from distbelief.kv.messages import Dense, Entry, Form, Rows
from distbelief.kv.tensorbytes import dtype_of, name_of

HELD = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def pair_up(keys: str | Sequence[str], values: Any, what: str) -> list[tuple[str, Any]]:
    """Pair several keys with as many values, or one key with one value. `what`: the values, for an error message."""
    if isinstance(keys, str):
        return [(keys, values)]
    given = list(keys)
    if not isinstance(values, Sequence) or isinstance(values, torch.Tensor | str) or len(values) != len(given):
        raise DistBeliefError(f"{len(given)} keys need a list of {len(given)} {what}", hint="one for each key")
    if len(set(given)) != len(given):
        raise DistBeliefError("a key is named twice in one call", hint="name each key once")
    return list(zip(given, values, strict=True))


def form_of(key: str, value: Any) -> Dense:
    """The form of a first value."""
    if not isinstance(value, torch.Tensor):
        raise DistBeliefError(
            f"the value of '{key}' is {type(value).__name__}, not a tensor", hint="torch.as_tensor(…)"
        )
    if value.dtype not in HELD or value.is_sparse:
        kind, held = "sparse " * value.is_sparse + name_of(value.dtype), ", ".join(name_of(one) for one in HELD)
        raise DistBeliefError(
            f"'{key}' has {kind} numbers: a store holds dense tensors of {held}",
            hint="value.float(), or init_table for rows of a large table",
        )
    return Dense(name_of(value.dtype), tuple(value.shape))


def describe(form: Form) -> str:
    """A form in words.

    >>> describe(Dense("float32", (2, 3)))
    'float32 numbers of shape [2, 3]'
    """
    if isinstance(form, Dense):
        return f"{form.dtype} numbers of shape {list(form.shape)}"
    return f"a table of {form.rows:,} rows of {form.width}"


def require_dense(key: str, entry: Entry) -> Dense:
    """The form of a key that must not be a table."""
    if isinstance(entry.form, Dense):
        return entry.form
    raise DistBeliefError(
        f"'{key}' is a table", hint=f"row_sparse_pull('{key}', rows), push('{key}', gradients, rows=…)"
    )


def require_table(key: str, entry: Entry) -> Rows:
    """The form of a key that must be a table."""
    if isinstance(entry.form, Rows):
        return entry.form
    raise DistBeliefError(
        f"'{key}' is no table, it is {describe(entry.form)}", hint="pull it whole, or declare a table with init_table"
    )


def require_like(key: str, form: Dense, value: Any, what: str) -> torch.Tensor:
    """The value, if it has the shape and the type of the key. `what`: its role, for an error message."""
    if not isinstance(value, torch.Tensor):
        raise DistBeliefError(f"{what} '{key}' is {type(value).__name__}, not a tensor", hint="torch.as_tensor(…)")
    found = Dense(name_of(value.dtype), tuple(value.shape))
    if found != form or value.is_sparse:
        has = f"{'sparse ' if value.is_sparse else ''}{describe(found)}"
        raise DistBeliefError(
            f"'{key}' holds {describe(form)}, but {what} it has {has}",
            hint="give the shape and the type that the key was initialised with",
        )
    return value.detach()


def row_numbers(key: str, form: Rows, rows: Any) -> torch.Tensor:
    """The numbers of rows, as an int64 tensor, if the table has them."""
    numbers = torch.as_tensor(rows).detach().cpu()
    if numbers.shape == (0,):
        numbers = numbers.to(torch.int64)  # torch takes an empty list for one of float32
    if numbers.dtype not in (torch.int64, torch.int32) or numbers.dim() != 1:
        raise DistBeliefError(
            f"rows of '{key}' were named by {name_of(numbers.dtype)} numbers of shape {list(numbers.shape)}",
            hint="use a list of int64 numbers",
        )
    numbers = numbers.to(torch.int64)
    outside = numbers[(numbers < 0) | (numbers >= form.rows)]
    if outside.numel():
        raise DistBeliefError(
            f"table '{key}' has no row {int(outside[0])}: it has {form.rows:,} rows",
            hint="declare the table with more rows, or bring the numbers into its range (e.g. by a hash)",
        )
    return numbers.contiguous()


def row_gradients(key: str, form: Rows, value: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(row numbers, a gradient for each), from a sparse tensor as nn.Embedding(sparse=True) gives it, or from both."""
    if isinstance(value, torch.Tensor) and value.is_sparse and rows is None:
        if value.sparse_dim() != 1 or value.dense_dim() != 1:
            raise DistBeliefError(f"the push of '{key}' is not sparse by rows", hint="one sparse dimension, then dense")
        rows, value = value._indices()[0], value._values()
    if rows is None:
        raise DistBeliefError(f"'{key}' is a table: which rows?", hint=f"push('{key}', gradients, rows=…)")
    numbers = row_numbers(key, form, rows)
    wanted = Dense("float32", (len(numbers), form.width))
    return numbers, require_like(key, wanted, value, "the push of").cpu().contiguous()


def output_tensor(key: str, form: Dense, out: torch.Tensor | None) -> torch.Tensor:
    """The tensor to put a value into: a new one, or `out`."""
    if out is None:
        return torch.empty(form.shape, dtype=dtype_of(form.dtype))
    return require_like(key, form, out, "the output for")
