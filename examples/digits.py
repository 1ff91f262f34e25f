"""Hand-written digits: 1,797 images of 8×8 pixels that come with scikit-learn, and a small convolutional network.

    distbelief train examples/digits.py --workers 2
    distbelief train examples/digits.py --workers 4 --set lr=0.01 --set epochs=10

A job file says what to learn and nothing else: no ranks, no devices, no loop. `job` is a function, so each of its
parameters can be set from the command line. The trained weights are the same, bit for bit, on any number of workers.
"""

import math

import torch
from torch import nn

from distbelief import Job, JobError, accuracy


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """All images as N×1×8×8 between 0 and 1, and which digit each one is."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise JobError("this example needs scikit-learn", hint="pip install 'distbelief[examples]'") from error
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    return images, torch.tensor(digits.target, dtype=torch.int64)


def network(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),  # 8×8 becomes 4×4
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * 4 * 4, 10),
    )


def job(
    lr: float = 2e-3,
    width: int = 32,
    dropout: float = 0.5,
    epochs: int = 30,
    batch: int = 64,
    weight_decay: float = 0.01,
    seed: int = 0,
) -> Job:
    images, digits = load()

    # The same fifth of the images is always held out for testing, whatever the job's own seed is.
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(1797))
    test, train = shuffled[: len(images) // 5], shuffled[len(images) // 5 :]

    # The learning rate rises over the first epoch, then falls along half a cosine to (almost) nothing.
    steps_per_epoch = math.ceil(len(train) / batch)
    total = epochs * steps_per_epoch

    def schedule(step: int) -> float:
        if step < steps_per_epoch:
            return (step + 1) / steps_per_epoch
        done = (step - steps_per_epoch) / max(1, total - steps_per_epoch)
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    return Job(
        name="digits",
        model=lambda: network(width, dropout),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay),
        schedule=schedule,
        clip_norm=1.0,
        data=(images[train], digits[train]),
        validation=(images[test], digits[test]),
        metrics={"accuracy": accuracy},
        global_batch=batch,
        epochs=epochs,
        evaluate_every=math.ceil(total / 8),
        seed=seed,
    )
