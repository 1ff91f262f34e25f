"""A model that is only tried out is left as it was: its modes, and whatever its own code keeps in its attributes.

A module that makes a table in its first pass and keeps it would otherwise keep one without values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def kept(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards every module has the attributes it had, and lists and dicts among them hold what they held.

    >>> model = torch.nn.Linear(2, 1)
    >>> with kept(model):
    ...     model.table = torch.zeros(3)
    >>> hasattr(model, "table")
    False
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, value.copy()) for _, before in attributes for value in before.values() if type(value) in _CONTAINERS
    ]
    try:
        yield
    finally:
        for present, before in attributes:
            for name in present.keys() - before.keys():
                del present[name]
            present.update(before)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


@contextmanager
def in_mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode for a while; afterwards each of its modules is as it was."""
    with kept(model):
        model.train(training)
        yield
