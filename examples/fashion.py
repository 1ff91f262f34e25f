"""Fashion-MNIST: 60,000 images of clothes in ten classes, from IDX files, and a convolutional network.

    apt-get install dataset-fashion-mnist
    distbelief train examples/fashion.py --workers 2
    distbelief train examples/fashion.py --workers 4 --set folder=/data/fashion --set limit=5000 --set epochs=1

MNIST itself, KMNIST and other relatives have files of the same names and work too.
"""

import math
from pathlib import Path

import torch
from torch import nn

from distbelief import Job, JobError, accuracy, idx

DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"  # where Debian's and Ubuntu's package puts the files


def load(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as N×1×28×28 between 0 and 1, and their classes. `idx` finds the files gzipped or not."""
    if not folder.is_dir():
        raise JobError(
            f"there is no folder {folder}",
            hint="apt-get install dataset-fashion-mnist, or say where the IDX files are: --set folder=PATH",
        )
    return idx(folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte")


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def network(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        *convolution(1, width),
        nn.MaxPool2d(2),  # 28×28 becomes 14×14
        *convolution(width, 2 * width),
        nn.MaxPool2d(2),  # 7×7
        *convolution(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * width * 2 * 2, 10),
    )


def job(
    folder: str = DEBIAN_FOLDER,
    limit: int = 0,
    lr: float = 0.05,
    momentum: float = 0.9,
    width: int = 24,
    dropout: float = 0.2,
    epochs: float = 3,
    batch: int = 128,
    seed: int = 0,
) -> Job:
    """`limit` uses only the first so many training images, for a quick look; 0 uses all."""
    if limit < 0:
        raise JobError(f"limit must be 0 (all images) or more, not {limit}")
    source = Path(folder).expanduser()
    images, classes = load(source, "train")
    if limit:
        images, classes = images[:limit], classes[:limit]

    # The learning rate rises over the first twentieth of the training, then falls along half a cosine.
    total = max(1, round(epochs * math.ceil(len(images) / batch)))
    warm_up = max(1, total // 20)

    def schedule(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, total - warm_up))))

    return Job(
        name="fashion",
        model=lambda: network(width, dropout),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=lr, momentum=momentum, nesterov=True, weight_decay=5e-4
        ),
        schedule=schedule,
        data=(images, classes),
        validation=load(source, "t10k"),
        metrics={"accuracy": accuracy},
        global_batch=batch,
        steps=total,
        evaluate_every=math.ceil(total / 6),
        seed=seed,
    )
