"""Delay compensation: a gradient that is late is corrected for the way that the parameters have gone meanwhile.

Zheng et al. 2017 (DC-ASGD): the first-order term of the gradient at the present values, with g ⊙ g in place of the
Hessian. The values that the gradient was computed with come along with it: so servers keep no copy per worker, and what
a slice becomes is a function of its changes alone, whoever is primary.
"""

from __future__ import annotations

import torch


def compensate(gradient: torch.Tensor, now: torch.Tensor, then: torch.Tensor, strength: float) -> None:
    """g + λ g ⊙ g ⊙ (w_now − w_then), in place. Where a value has not moved, the gradient keeps its bits.

    >>> g = torch.tensor([2.0, 2.0, -0.0])
    >>> compensate(g, now=torch.tensor([1.5, 1.0, 1.0]), then=torch.ones(3), strength=0.1)
    >>> g
    tensor([2.2000, 2.0000, -0.0000])
    """
    if torch.equal(now, then):
        return
    moved = now - then
    corrected = torch.addcmul(gradient, gradient * gradient, moved, value=strength)
    gradient.copy_(torch.where(moved == 0, gradient, corrected))
