"""Which items does a user click on? Wide & Deep (Cheng et al., 2016) on generated clicks whose best score is known.

    distbelief train examples/recommend.py --workers 2
    distbelief train examples/recommend.py --workers 2 --set users=100000 --set items=10000 --set steps=100
    distbelief train examples/recommend.py --workers 2 --set users=50000000 --strategy ps:async

Nothing is downloaded: a small world of users, items and hours gives every impression its true probability of a click,
and the clicks are drawn from it. So the best possible score is known, and the metrics show both:

    loss, best_loss   mean log-loss on the clicks of the test set: of the model, and of the true probabilities
    auc, best_auc     how often a clicked impression has a higher score than another one of the same batch
    learned           0 for a model that knows only the overall click rate, 1 for one that knows the true probabilities

As it stands, knowing only the click rate gives a loss of 0.433 and the true probabilities give 0.364. One pass over the
data gives 0.369, learned 0.93. Most of what remains to learn is about users who are seldom seen.

The tables of users, items and crosses are `EmbeddingTable`s: under parameter servers (`ps`) only rows that have learnt
something take memory, so the number of users may be very large.
"""

import math
import zlib

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.nn import functional as F

from distbelief import EmbeddingTable, Job, JobError

GROUPS, CATEGORIES, HOURS, TASTES = 8, 12, 24, 2
TEST = 50_000  # impressions that are never trained on: the first ones, the same however many there are to train on
TICKS = 1 << 16  # true probabilities are multiples of 1/TICKS: far coarser than the last bits in which machines differ


def chance(name: str, *keys: ArrayLike) -> NDArray[np.float64]:
    """Pseudo-random numbers in [0, 1): a hash (SplitMix64's) of their purpose and of whole numbers.

    There is no generator with a state, so the taste of user 49,999,999 costs nothing until that user occurs.
    """
    state = np.full(1, zlib.crc32(name.encode()), np.uint64)
    for key in (0, *keys):
        state = (state + np.asarray(key).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def effect(name: str, *keys: ArrayLike) -> NDArray[np.float64]:
    """As `chance`, with mean 0 and variance 1."""
    return (chance(name, *keys) - 0.5) * math.sqrt(12)


def popular(chances: NDArray[np.float64], count: int, head: float = 10.0) -> NDArray[np.int64]:
    """Numbers below `count` with a long tail (Zipf's law): number n comes up in proportion to about 1 / (n + head)."""
    drawn = head * (1 + count / head) ** chances - head
    return np.minimum(drawn.astype(np.int64), count - 1)


def impressions(first: int, count: int, users: int, items: int) -> tuple[torch.Tensor, ...]:
    """Impressions `first` and after: user, item, group of the user, category of the item, hour; and the outcome.

    The last tensor has two columns: whether there was a click, and how probable it was. Only metrics see the second.
    """
    number = np.arange(first, first + count)
    user, item = popular(chance("user", number), users), popular(chance("item", number), items)
    hour = (chance("hour", number) * HOURS).astype(np.int64)
    group = (chance("group of user", user) * GROUPS).astype(np.int64)
    category = (chance("category of item", item) * CATEGORIES).astype(np.int64)

    log_odds = -2 + 0.6 * effect("item", item) + 0.3 * effect("user", user) + 0.4 * effect("hour", hour)
    log_odds += 0.7 * effect("group and category", group, category) + 0.4 * effect("category, hour", category, hour)
    for taste in range(TASTES):  # latent factors: what the user likes, and how much of it the category has
        log_odds += 0.3 * effect("taste of user", user, taste) * effect("taste of category", category, taste)

    ticks = np.clip(np.rint(TICKS / (1 + np.exp(-log_odds))), 1, TICKS - 1)
    outcome = np.stack([chance("click", number) * TICKS < ticks, ticks / TICKS], axis=1).astype(np.float32)
    return tuple(torch.from_numpy(column) for column in (user, item, group, category, hour, outcome))


def crossed(cross: int, a: torch.Tensor, b: torch.Tensor, buckets: int) -> torch.Tensor:
    """One number below `buckets` for each pair of numbers: the hashed cross of two features."""
    return (a * 0x9E3779B1 + b * 0x85EBCA77 + cross * 0xC2B2AE3D) % 0x7FFFFFFF % buckets


class WideAndDeep(nn.Module):
    """Wide: a weight for each pair of features, which memorizes. Deep: embeddings and layers, which generalize."""

    def __init__(self, users: int, items: int, crosses: int, width: int, hidden: int) -> None:
        super().__init__()
        large = {"user": users, "item": items}
        small = {"group": GROUPS, "category": CATEGORIES, "hour": HOURS}
        self.tables = nn.ModuleDict(
            {name: EmbeddingTable(size, width, init=("normal", 0.05)) for name, size in large.items()}
            | {name: nn.Embedding(size, width) for name, size in small.items()}
        )
        self.wide = EmbeddingTable(crosses, 1, init="zeros")
        self.deep = nn.Sequential(
            nn.Linear(width * len(self.tables), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.Linear(hidden // 2, 1),
        )
        for name in small:
            nn.init.normal_(self.tables[name].weight, std=0.05)

    def forward(
        self, user: torch.Tensor, item: torch.Tensor, group: torch.Tensor, category: torch.Tensor, hour: torch.Tensor
    ) -> torch.Tensor:
        ids = user, item, group, category, hour
        rows = torch.cat([table(row) for table, row in zip(self.tables.values(), ids, strict=True)], dim=1)
        pairs = (user, category), (group, category), (category, hour), (item, group)
        buckets = [crossed(cross, a, b, self.wide.rows) for cross, (a, b) in enumerate(pairs)]
        return self.deep(rows).squeeze(1) + self.wide(torch.stack(buckets, dim=1)).sum(dim=(1, 2))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output.float(), target[:, 0])


def log_loss(scores: torch.Tensor, chances: torch.Tensor) -> float:
    """The sum over a batch, if clicks have these probabilities (0 and 1 are the outcomes)."""
    return float(F.binary_cross_entropy_with_logits(scores.double(), chances.double(), reduction="sum"))


def best_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
    """The `loss` of the true probabilities: a model does better only by luck in the draw of the clicks."""
    return log_loss(target[:, 1].logit(), target[:, 0]), len(target)


def learned(output: torch.Tensor, target: torch.Tensor, click_rate: float) -> tuple[float, float]:
    """(gained, to gain) in expected log-loss over a model that knows only the click rate. The draw plays no part."""
    truth = target[:, 1]
    nothing = log_loss(torch.full_like(truth, click_rate).logit(), truth)
    return nothing - log_loss(output, truth), nothing - log_loss(truth.logit(), truth)


def ordered_pairs(scores: torch.Tensor, clicked: torch.Tensor) -> tuple[float, int]:
    """Pairs of a clicked impression and another one with the higher score at the first (a tie is half), and all pairs.

    The area under the curve is a share of pairs, not a mean over samples. Pairs within batches are a fair sample of
    all pairs, and can be counted: so it is right for any number of workers, as batches of an evaluation are fixed.
    """
    yes, no = scores[clicked > 0.5].contiguous(), scores[clicked <= 0.5].sort().values
    below, not_above = torch.searchsorted(no, yes), torch.searchsorted(no, yes, right=True)
    return float((below + not_above).sum()) / 2, len(yes) * len(no)


def job(
    users: int = 1000,
    items: int = 300,
    crosses: int = 1 << 16,
    width: int = 8,
    hidden: int = 64,
    lr: float = 0.2,
    steps: int = 500,
    batch: int = 2048,
    samples: int = 500 * 2048,
    seed: int = 0,
) -> Job:
    """`users`, `items` and `crosses` are the rows of the large tables; `samples`, how many impressions to train on."""
    sizes = {"users": users, "items": items, "crosses": crosses, "width": width, "samples": samples, "steps": steps}
    for name, size in sizes.items():
        if size < 1:
            raise JobError(f"{name} must be 1 or more, not {size}")
    if hidden < 2:
        raise JobError(f"hidden must be 2 or more (the second layer has half of it), not {hidden}")
    data = impressions(TEST, samples, users, items)
    click_rate = float(data[-1][:, 0].mean())
    warm_up = max(1, steps // 20)

    def schedule(step: int) -> float:
        return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))

    return Job(
        name="recommend",
        model=lambda: WideAndDeep(users, items, crosses, width, hidden),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=lr),
        schedule=schedule,
        data=data,
        validation=impressions(0, TEST, users, items),
        metrics={
            "best_loss": best_loss,
            "auc": lambda output, target: ordered_pairs(output, target[:, 0]),
            "best_auc": lambda output, target: ordered_pairs(target[:, 1], target[:, 0]),
            "learned": lambda output, target: learned(output, target, click_rate),
        },
        global_batch=batch,
        steps=steps,
        evaluate_every=math.ceil(steps / 5),
        seed=seed,
    )
