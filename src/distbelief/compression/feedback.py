"""Error feedback: what an encoding lost is added to the next vector of that name, so that nothing is lost for good.

The sum of all that was sent then differs from the sum of all that should have been by one residual, however many steps
there were (Seide et al. 2014; Stich et al. 2018). Residuals are state of a run: whoever checkpoints it saves `state`.
A vector is encoded once per step. What must be sent again is the same message, not the vector encoded anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distbelief.compression.codec import Codec, Encoded, checked
from distbelief.errors import DistBeliefError


class Feedback:
    """
    >>> from distbelief.compression.topk import TopK
    >>> feedback = Feedback(TopK(0.5))
    >>> for _ in range(3):
    ...     sent = feedback.encode("bias", torch.tensor([2.0, 1.5]))
    ...     print(sent.frames[0].tolist(), sent.frames[1].tolist())
    [0] [2.0]
    [1] [3.0]
    [0] [4.0]
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._residuals: dict[str, Tensor] = {}

    def encode(self, name: str, vector: Tensor, reuse: Encoded | None = None) -> Encoded:
        """Encode the vector and what earlier ones of this name left behind. The vector itself is not changed."""
        return self.codec.encode_keeping(self._residual(name, vector), vector, reuse)

    def release(self, name: str, vector: Tensor) -> None:
        """Add to a vector that goes out uncompressed, in place, what was left behind, and forget that."""
        left = self._residuals.pop(name, None)
        if left is not None:
            _same_length(name, left, vector)
            checked(vector).add_(left)

    def state(self) -> dict[str, Tensor]:
        """Copies of the residuals by name, for a checkpoint."""
        return {name: residual.clone() for name, residual in self._residuals.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from these residuals, and from zero for every other name."""
        self._residuals = {name: checked(residual).clone() for name, residual in state.items()}

    def _residual(self, name: str, vector: Tensor) -> Tensor:
        vector = checked(vector)
        residual = self._residuals.get(name)
        if residual is None:
            residual = self._residuals[name] = torch.zeros_like(vector)
        _same_length(name, residual, vector)
        return residual


def _same_length(name: str, residual: Tensor, vector: Tensor) -> None:
    if residual.numel() != vector.numel():
        raise DistBeliefError(
            f"the vector {name!r} has {vector.numel()} elements, and had {residual.numel()} when last compressed",
            hint="release the residuals before slices are cut anew, or begin with none",
        )
