"""What is done to a shard's tiles as they become ready, some of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distbelief.transport.device.exchange import Stretch


def when_whole(stretches: Sequence[Stretch], act: Callable[[int], None]) -> Callable[[int], None]:
    """To be told of every tile that is ready, in any order: `act` is called once per stretch, with its number, when all
    of its tiles are.

    >>> import torch
    >>> two = [Stretch(range(2), torch.float32, 0, 128), Stretch(range(2, 3), torch.float32, 512, 64)]
    >>> tell = when_whole(two, print)
    >>> tell(1), tell(2), tell(0)
    1
    0
    (None, None, None)
    """
    number_of = [number for number, stretch in enumerate(stretches) for _ in stretch.tiles]
    missing = [len(stretch.tiles) for stretch in stretches]

    def tile_ready(tile: int) -> None:
        number = number_of[tile]
        missing[number] -= 1
        if not missing[number]:
            act(number)

    return tile_ready
