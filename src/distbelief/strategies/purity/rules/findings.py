"""What makes a shard's result depend on more than (committed state, samples, seed): in words, with the way out.

Takes the names of what was seen to change, and returns sentences. It knows neither tensors nor how changes are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distbelief.strategies.purity import Impurity

RULES = "docs/purity.md says what a job's code may do; --impure trains nevertheless"
MOST_NAMED = 3
MOST_TOLD = 4

Kind = Literal["value", "tensor", "generator", "late buffer", "other module"]
"""`late buffer`: of the model, but made in forward; `other module`: a buffer or parameter outside of the model."""


# --- parameters ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A parameter that was written while a shard was computed."""

    name: str
    learns: bool
    """Whether it is trainable, and the shard gave it a gradient."""
    max_norm: float | None = None
    """The limit of the embedding layer that it belongs to."""
    is_new: bool = False
    """Whether it did not exist before the shard."""
    is_removed: bool = False
    """Whether it does not exist after the shard."""


def written(parameters: Sequence[Written]) -> list[Impurity]:
    """
    >>> found = written([Written("teacher.weight", False), Written("teacher.bias", False)])
    >>> found[0].what
    '`teacher.weight` and `teacher.bias` are written in forward'
    """
    new = [one.name for one in parameters if one.is_new]
    removed = [one.name for one in parameters if one.is_removed]
    parameters = [one for one in parameters if not one.is_removed]
    limited = [one for one in parameters if one.max_norm is not None and not one.is_new]
    others = [one for one in parameters if one.max_norm is None and not one.is_new]
    found = []
    if new:
        found.append(
            Impurity(
                f"{_listed(new)} {_is(new)} made in forward, and would never be trained",
                "make every parameter in the module's __init__",
            )
        )
    if removed:
        found.append(
            Impurity(
                f"{_listed(removed)} {_is(removed)} removed or replaced by another parameter in forward",
                "tie weights in the module's __init__",
            )
        )
    found += [
        Impurity(
            f"`{one.name}` is written in forward: its layer has max_norm={one.max_norm:g}, and shortens the rows that "
            "it looks up",
            "leave max_norm out, and limit the rows in `Job.after_update`",
        )
        for one in limited
    ]
    if constrained := [one.name for one in others if one.learns]:
        found.append(
            Impurity(
                f"{_listed(constrained)} {_is(constrained)} written in forward",
                "a constraint on weights (a clamp, a norm) belongs in `Job.after_update`, and initial values where the "
                "model is made: forward runs once per shard, on the workers that have a shard",
            )
        )
    if kept := [one.name for one in others if not one.learns]:
        it = "it a buffer" if len(kept) == 1 else "them buffers"
        found.append(
            Impurity(
                f"{_listed(kept)} {_is(kept)} written in forward",
                f"make {it} (`register_buffer`): buffers are restored before each shard, and committed with the step",
            )
        )
    return found


# --- hidden state ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hidden:
    """State outside of parameters and buffers, on which a shard's result depends."""

    name: str
    owner: str
    """For people: "a Python attribute of Encoder"."""
    kind: Kind
    in_loss: bool = False
    """Whether the loss holds it, not the model."""


def hidden(places: Sequence[Hidden]) -> list[Impurity]:
    return [Impurity(f"`{one.name}` ({one.owner}) {_verb(one)}", _way_out(one)) for one in places[:MOST_TOLD]]


def _verb(one: Hidden) -> str:
    if one.kind == "generator":
        return "draws other numbers each time"
    where = "in the loss" if one.in_loss else "while a shard is computed"
    return f"changes {where}, and the result depends on it"


def _way_out(one: Hidden) -> str:
    if one.kind == "generator":
        return (
            "draw without a generator of your own: torch's, numpy's and Python's global ones are seeded for each shard"
        )
    if one.kind == "late buffer":
        return f"register `{one.name}` in the module's __init__"
    if one.name.rpartition(".")[2] == "training":
        return (
            "override `train` of that module, so that its mode never changes (`def train(self, mode=True): return "
            "super().train(False)`): evaluations call `eval` and `train` of the whole model"
        )
    if one.in_loss:
        return (
            f"the loss must be a function of output and target: keep `{one.name}` as a buffer of the model "
            "(`register_buffer`), and let the model return what the loss needs"
        )
    if one.kind == "other module":
        return f"make `{one.name}` a buffer of the model (`register_buffer`), which is restored before each shard"
    if one.kind == "tensor":
        return (
            f"keep `{one.name}` as a buffer (`register_buffer`) if it is a statistic (a buffer becomes its average "
            "over the shards); a state that belongs to one sequence of samples must begin anew in each batch"
        )
    return (
        f"keep `{one.name}` as a buffer (`register_buffer`), which is restored before each shard and committed with "
        "the step: a counter then counts steps"
    )


def unexplained(gradients: Sequence[str], buffers: Sequence[str], changed: Sequence[str]) -> Impurity:
    """`gradients`, `buffers`: what differed between two computations of one shard, in the model's order; `changed`:
    Python state that changed meanwhile, and whose restoration did not help."""
    what = "the same shard, computed again, gave "
    if gradients:
        others = f" and {len(gradients) - 1} more" if len(gradients) > 1 else ""
        what += f"another gradient of `{gradients[0]}`{others}"
    else:
        what += f"another value of the buffer `{buffers[0]}`" if buffers else "another loss"
    if changed:
        what += (
            f" ({_listed(changed)} changed meanwhile; with {'it' if len(changed) == 1 else 'them'} put back it did too)"
        )
    return Impurity(
        what,
        "it depends on something besides parameters, buffers, samples and seed: the time, a file, os.urandom, a "
        "generator made without a seed, or an operation that is not deterministic on this device or with these threads",
    )


# --- updates ---------------------------------------------------------------------------------------------------------


def schedule_differs(changed: Sequence[Hidden]) -> Impurity:
    """
    >>> schedule_differs([Hidden("calls", "a global variable of job.py", "value")]).what
    '`schedule` gave two factors for one step (`calls`, a global variable of job.py, changed meanwhile)'
    """
    what = "`schedule` gave two factors for one step"
    if changed:
        what += f" (`{changed[0].name}`, {changed[0].owner}, changed meanwhile)"
    return Impurity(what, "make it a function of the step alone: several workers call it, and again after a death")


def optimizer_differs(kind: str, changed: Sequence[str]) -> Impurity:
    """`changed`: what changes in a step, besides `state`."""
    where = f", in {_listed(changed)}" if changed else ""
    return Impurity(
        f"the optimizer {kind} keeps state outside of `optimizer.state`{where}: a new one, with the saved state, takes "
        "another step",
        "keep it in `self.state[parameter]`, as a tensor or a number: this is shared by the workers, and saved",
    )


def counts_calls(what: str, counter: Hidden, of: str) -> Impurity:
    """`of`: of what it must be a function."""
    return Impurity(
        f"{what} counts its calls in `{counter.name}` ({counter.owner}), and later the result depends on it",
        f"make it a function of {of} alone: workers call it at other times, and again after a death",
    )


# --- samples ---------------------------------------------------------------------------------------------------------


def sample_differs(kind: str, sample: int) -> Impurity:
    """
    >>> sample_differs("Noise", 17).what
    '`Noise.__getitem__(17)` gave two different samples'
    """
    return Impurity(
        f"`{kind}.__getitem__({sample})` gave two different samples",
        "draw from the global generators (torch.rand, numpy.random.rand, random.random), which are seeded for each "
        "sample, and keep nothing from one sample to the next",
    )


def batch_differs(kind: str, samples: str, has_collate: bool) -> Impurity:
    """Each sample, read alone, is the same each time, but their batch is not."""
    if has_collate:
        return Impurity(
            f"`collate` made two different batches of {samples}",
            "make it a function of the samples: draw from torch's, numpy's or Python's global generators, which are "
            "seeded",
        )
    return Impurity(
        f"`{kind}` gave two different batches of {samples}",
        "a sample must not depend on the samples that were read before it, nor on the time",
    )


def random_result_kept(what: str) -> Impurity:
    """
    >>> random_result_kept("`Memo.__getitem__(17)`").what
    '`Memo.__getitem__(17)` keeps a random result from one epoch to the next'
    """
    return Impurity(
        f"{what} keeps a random result from one epoch to the next",
        "cache what comes before the random part: every reader has a cache of its own, so the epoch that a cached "
        "random number comes from depends on the workers",
    )


# --- what the user reads ---------------------------------------------------------------------------------------------


def refusal(found: Sequence[Impurity]) -> tuple[str, str, str]:
    """(message, hint, details) of the error that ends the run. With several reasons the details list all of them."""
    first = found[0]
    message = f"the result would depend on the cluster: {first.what}"
    if len(found) == 1:
        return message, f"{first.way_out}; {RULES}", ""
    return f"{message} (and {len(found) - 1} more)", RULES, "\n".join(f"{one.what}: {one.way_out}" for one in found)


def notice(found: Sequence[Impurity]) -> str:
    """For `--impure`."""
    return f"the result depends on the cluster (--impure): {'; '.join(one.what for one in found)}"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["a", "b", "c", "d", "e"])
    '`a`, `b`, `c` and 2 more'
    """
    shown = [f"`{name}`" for name in names[:MOST_NAMED]]
    if len(names) > MOST_NAMED:
        return f"{', '.join(shown)} and {len(names) - MOST_NAMED} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
