"""Which state each generator is in while code is recorded that draws from it, though nothing is drawn.

After each random operation its generator gets a state that occurs nowhere else, a mark. The state that is found before
the next one then tells what happened to the generator in between: nothing, a seed, or a state that was saved earlier.
No call of torch's has to be replaced for it.
"""

from __future__ import annotations

import torch

from distbelief.strategies.mesh.init.history import History, cannot_follow


class Streams:
    """Which numbered state each generator is in while nothing is drawn from it."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._marks: dict[bytes, int] = {}
        self._count = 0
        self._found: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def find(self, generator: torch.Generator) -> int:
        if generator.device.type != "cpu":
            raise cannot_follow(f"a generator on {generator.device}")
        state = generator.get_state()
        self._found.setdefault(_address(generator), (generator, state))
        content = state.numpy().tobytes()
        if content not in self._marks:
            seeded = torch.Generator().manual_seed(generator.initial_seed()).get_state()
            if _address(generator) == _address(torch.default_generator) and not torch.equal(state, seeded):
                raise cannot_follow("random numbers drawn in another thread, or a state of the generator from outside")
            self._marks[content] = self._history.begin_state(state)
        return self._marks[content]

    def mark(self, generator: torch.Generator, number: int) -> None:
        """Put it, under its own seed, where no other mark is: so many numbers on as there are marks."""
        self._count += 1
        generator.manual_seed(generator.initial_seed())
        torch.empty(self._count, device="cpu").random_(generator=generator)
        self._marks[generator.get_state().numpy().tobytes()] = number

    def restore(self) -> None:
        for generator, state in self._found.values():
            generator.set_state(state)


def _address(generator: torch.Generator) -> int:
    """Python has a new object for the same generator in every call."""
    return int(generator._cdata)  # type: ignore[attr-defined]
