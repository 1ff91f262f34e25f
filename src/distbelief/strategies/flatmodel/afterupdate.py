"""The functions of `Job.after_update`: each is applied to one parameter, right after the optimizer has updated it.

A function gets the whole parameter, so the layout keeps such a parameter inside one tile (layout.py). The function runs
while the tile is open. If the member dies meanwhile, the tile's old bytes are restored (state.py), and another member
repeats the optimizer and the function. So the function must be pure: its result depends on the parameter's value alone.
`parameter_functions` tests this before training.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from distbelief.errors import JobError, StepCodeError
from distbelief.job import Job
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.strategies.tables.embedding import tables_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ParameterFunction:
    """A function of `after_update` and a parameter that its pattern matches."""

    pattern: str
    parameter: str
    function: Callable[[torch.Tensor], object]

    def __str__(self) -> str:
        return f"`after_update['{self.pattern}']`"

    def apply(self, value: torch.Tensor, step: int) -> None:
        """Apply the function to the parameter's whole value, in place."""
        try:
            problem = self.change(value)
        except Exception as error:
            raise StepCodeError(f"{self} failed on '{self.parameter}'", step, error) from error
        if problem:
            raise StepCodeError(f"{self} {problem}", step)

    def change(self, value: torch.Tensor) -> str:
        """Like `apply`; returns what is wrong with the function's result, or an empty string."""
        given = value.detach()  # the function may exchange its data
        with torch.no_grad():
            result = self.function(given)
        if result is None:
            result = given
        if not isinstance(result, torch.Tensor):
            return (
                f"returned a {type(result).__name__}: return the new value of '{self.parameter}', or change it in place"
            )
        if (result.shape, result.dtype) != (value.shape, value.dtype):
            return f"made {_form(result)} of '{self.parameter}', which is {_form(value)}"
        if not result.is_set_to(value):
            overlaps = result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            value.copy_(result.detach().clone() if overlaps else result.detach())
        return ""


Functions = Mapping[int, Sequence[ParameterFunction]]
"""By parameter number: the functions of a parameter, in the order in which they are applied."""


def parameter_functions(job: Job, model: torch.nn.Module) -> Functions:
    """The functions of the job for this model's parameters. Each one is tried on a copy of the parameter's initial
    value: a function that is not pure, or makes something else of a parameter, is refused. It is also tried on made-up
    values, which may be outside of its domain."""
    if not job.after_update:
        return {}
    found = _matched(job, model)
    first = _tried(found, model)
    with _disturbed(model):
        second = _tried(found, model, disturbed=True)
    for (number, one), sum_ in second.items():
        if first[number, one] != sum_:
            raise JobError(
                f"{one} gave two results for one value of '{one.parameter}'",
                hint="it must be a function of the parameter's value alone, without counters, random numbers and other "
                "parameters, which other workers update meanwhile: a repeated step must give the same bits",
            )
    return found


def _matched(job: Job, model: torch.nn.Module) -> dict[int, list[ParameterFunction]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)  # a tied parameter has several names
    found: dict[int, list[ParameterFunction]] = {}
    for pattern, function in job.after_update.items():
        for table, _ in tables_of(model):
            if fnmatchcase(f"{table}.weight", pattern):
                raise JobError(
                    f"`after_update['{pattern}']` matches '{table}.weight', a table whose rows are on servers",
                    hint="let the pattern match other parameters only, or use --strategy allreduce",
                )
        matched = False
        for number, (name, parameter) in enumerate(trainable(model)):
            if any(fnmatchcase(one, pattern) for one in names[id(parameter)]):
                found.setdefault(number, []).append(ParameterFunction(pattern, name, function))
                matched = True
        if not matched:
            known = ", ".join(name for name, _ in trainable(model))
            raise JobError(
                f"`after_update['{pattern}']` matches no trainable parameter of the model",
                hint=f"the trainable parameters are {known}",
            )
    return found


def _tried(
    found: Functions, model: torch.nn.Module, disturbed: bool = False
) -> dict[tuple[int, ParameterFunction], tuple[int, int]]:
    """Apply every function to a copy of its parameter's initial value, and to made-up values. Returns checksums of the
    results; 0: the function takes no such values."""
    parameters = [parameter for _, parameter in trainable(model)]
    applied = [(number, one) for number, several in found.items() for one in several]
    sums = {}
    for pattern in dict.fromkeys(one.pattern for _, one in applied):
        before = _sums(model)
        for number, one in [(number, one) for number, one in applied if one.pattern == pattern]:
            value = _initial(parameters[number], disturbed)
            try:
                problem = one.change(value)
            except Exception as error:
                raise JobError(
                    f"{one} failed on '{one.parameter}': {type(error).__name__}: {error}",
                    details="".join(traceback.format_exception(error)),
                ) from error
            if problem:
                raise JobError(f"{one} {problem}")
            made = _made(parameters[number], number)
            try:
                is_taken = not one.change(made)
            except Exception:
                is_taken = False
            sums[number, one] = _sum(value), _sum(made) if is_taken else 0
        for name, sum_ in _sums(model).items():
            if before[name] != sum_:
                raise JobError(
                    f"`after_update['{pattern}']` writes to '{name}', not only to the value that it is given",
                    hint="a function of `after_update` changes one parameter: write one for each",
                )
    return sums


@contextmanager
def _disturbed(model: torch.nn.Module) -> Iterator[None]:
    """Give all floating-point tensors of the model other values in this block, so that a function that reads them gives
    another result."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor in tensors:
            _disturb(tensor)
        yield
    finally:
        for tensor in reversed(tensors):
            _disturb(tensor)


def _disturb(tensor: torch.Tensor) -> None:
    """Give a floating-point tensor other values, and its old ones at the second call. Zeros become 0.5."""
    if tensor.is_floating_point() and not tensor.is_meta and 0 not in tensor.stride():
        kind = _INTEGERS[tensor.element_size()]
        half = torch.tensor(0.5, dtype=tensor.dtype, device=tensor.device)
        tensor.view(kind).bitwise_xor_(half.view(kind))


def _initial(parameter: torch.nn.Parameter, disturbed: bool) -> torch.Tensor:
    """A copy of the parameter's initial value; `disturbed`: the parameter has other values now."""
    if parameter.is_meta:
        return _made(parameter, 0)
    value = parameter.detach().clone()
    if disturbed and 0 not in parameter.stride():
        _disturb(value)
    return value


def _made(parameter: torch.nn.Parameter, number: int) -> torch.Tensor:
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    generator = torch.Generator(device).manual_seed(number)
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    return value.uniform_(-2, 2, generator=generator)


def _sums(model: torch.nn.Module) -> dict[str, int]:
    """Checksums of all tensors of the model that have values."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: _sum(tensor) for name, tensor in named if not tensor.is_meta}


def _sum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.")
