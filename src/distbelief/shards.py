"""The shard is the unit of work: it fixes the samples, the seed and the place in the sum.

Everything here is a pure function of numbers that the job fixes (seed, step, shard); nothing depends on the number of
workers. A step uses one global batch, cut into V shards. The shards' gradients are added along one binary tree over the
shard numbers, so any assignment of shards to workers gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]  # half-open: (first, end)

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash integers to 64 well-mixed bits (splitmix64's finaliser, once per number).

    >>> mix(1, 2) != mix(2, 1)
    True
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 30)) * 0x94D049BB133111EB & _MASK
        state = (state ^ (state >> 27)) + 0x9E3779B97F4A7C15 & _MASK
    return state ^ (state >> 31)


def shard_seed(seed: int, step: int, shard: int) -> int:
    """The seed for all random numbers of shard `shard` in step `step` (dropout, noise)."""
    return mix(seed, 1, step, shard) >> 1  # torch.manual_seed wants a signed 64-bit number


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """The seed for all random numbers while one sample is read (augmentation)."""
    return mix(seed, 2, epoch, sample) >> 1


@dataclass(frozen=True)
class Schedule:
    """The position of step t in the data: epoch, first position, size. A batch never crosses the end of an epoch.

    >>> s = Schedule(samples=10, global_batch=4, shards=2)
    >>> [s.batch(t) for t in range(4)]
    [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]
    >>> s.shard(2, 1)   # the last batch has 2 samples: the first shard takes both, the second is empty
    (0, 10, 10)
    """

    samples: int
    global_batch: int
    shards: int
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.samples, self.global_batch)
        return full + (1 if rest and not (self.drop_last and full) else 0)

    def batch(self, step: int) -> tuple[int, int, int]:
        """(epoch, first, end): positions in the epoch's order of samples."""
        epoch, index = divmod(step, self.steps_per_epoch)
        first = index * self.global_batch
        return epoch, first, min(first + self.global_batch, self.samples)

    def shard(self, step: int, shard: int) -> tuple[int, int, int]:
        """(epoch, first, end) of one shard. The cuts are those of a full batch, so a partial batch fills the first
        shards and leaves the others empty; spreading single samples over all shards would break batch statistics."""
        epoch, first, end = self.batch(step)
        low = first + shard * self.global_batch // self.shards
        high = first + (shard + 1) * self.global_batch // self.shards
        return epoch, min(low, end), min(high, end)

    def occupied(self, step: int) -> int:
        """The number of shards of this step that have samples. They are always the first ones."""
        _, first, end = self.batch(step)
        if end - first == self.global_batch:
            return self.shards
        return sum(1 for v in range(self.shards) if v * self.global_batch // self.shards < end - first)


def split(node: Range) -> tuple[Range, Range]:
    """The two children of a tree node: cut at the largest power of two below its size.

    >>> split((0, 5))
    ((0, 4), (4, 5))
    """
    low, high = node
    middle = low + (1 << (high - low - 1).bit_length() - 1)
    return (low, middle), (middle, high)


def cover(shards: int, mine: Range) -> list[Range]:
    """The largest subtrees of the tree over `shards` that lie inside `mine`, left to right.

    >>> cover(8, (0, 4)), cover(8, (3, 6))
    ([(0, 4)], [(3, 4), (4, 6)])
    """

    def visit(node: Range) -> list[Range]:
        low, high = node
        if high <= mine[0] or mine[1] <= low:
            return []
        if mine[0] <= low and high <= mine[1]:
            return [node]
        left, right = split(node)
        return visit(left) + visit(right)

    return visit((0, shards)) if shards else []


Program = int | tuple["Program", "Program"]


def program(shards: int, occupied: int, sources: dict[Range, int]) -> Program:
    """The order of adding partial sums: a nested pair of source numbers, e.g. ((0, 1), 2) means (0 + 1) + 2.

    `sources` maps the available subtrees to numbers. A subtree without samples is skipped: its sibling is the sum.

    >>> program(8, 8, {(0, 2): 0, (2, 3): 1, (3, 4): 2, (4, 8): 3})
    ((0, (1, 2)), 3)
    >>> program(8, 3, {(0, 2): 0, (2, 3): 1, (3, 4): 2, (4, 8): 3})
    (0, 1)
    """

    def visit(node: Range) -> Program:
        if node in sources:
            return sources[node]
        if node[1] - node[0] == 1:
            raise KeyError(f"no partial sum covers shard {node[0]}")
        left, right = split(node)
        if right[0] >= occupied:
            return visit(left)
        return visit(left), visit(right)

    return visit((0, shards))


def default_shards(global_batch: int) -> int:
    """The default number of shards. docs/decisions/0003 has the measurements behind it."""
    shards = 1
    while shards < 8 and global_batch // (2 * shards) >= 4:
        shards *= 2
    return shards
