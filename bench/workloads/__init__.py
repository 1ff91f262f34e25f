"""The workloads by name. Where the usual size would be hopeless for one thread of a CPU, it is less and says so."""

from __future__ import annotations

from functools import partial

from torch.nn import functional as F

from bench.workloads import dense, resnet, transformer, wide_deep
from bench.workloads.workload import SEED, Data, Update, Workload

__all__ = ["SEED", "WORKLOADS", "Data", "Update", "Workload"]

_ADAMW = partial(Update, "adamw", weight_decay=0.01)
_MOMENTUM = partial(Update, "sgd", momentum=0.9)

WORKLOADS = {
    "mlp": Workload(
        "MLP 784-1024-1024-10, ReLU, SGD momentum, 128 samples per worker",
        128, dense.mlp, dense.vectors, F.cross_entropy, _MOMENTUM(0.02), bound_by="communication",
    ),
    "cnn": Workload(
        "CNN 1×28×28: conv 32, conv 64, fc 128, SGD momentum, 64 samples per worker",
        64, dense.cnn, dense.images, F.cross_entropy, _MOMENTUM(0.01),
    ),
    "gpt": Workload(
        "GPT: 6 layers, 256 wide, 8 heads, 128 symbols, AdamW, 8 sequences per worker",
        8, transformer.GPT, transformer.sequences, transformer.symbol_loss, _ADAMW(1e-3), blocks=("blocks", 6),
    ),
    "resnet": Workload(
        "ResNet-18 on 3×64×64 (not 224×224: one thread), 100 classes, SGD momentum, 8 samples per worker",
        8, partial(resnet.resnet18, 100), partial(dense.images, 3, 64, 100, 1024), F.cross_entropy, _MOMENTUM(0.002),
        same_end=0.05, batch_norm=True,
    ),
    "bert": Workload(
        "BERT-base (12 layers, 768 wide, 30,522 symbols; 64 long, not 512: one thread), AdamW, 1 sequence per worker",
        1, transformer.BERT, transformer.hidden_symbols, transformer.symbol_loss, _ADAMW(1e-4), blocks=("blocks", 12),
        same_end=0.05, bound_by="communication",
    ),
    "wide_deep": Workload(
        "Wide & Deep: 8 fields of 20,000 categories, 16 wide, deep 256-128, SGD momentum, 512 samples per worker",
        512, wide_deep.WideDeep, wide_deep.clicks, wide_deep.click_loss, _MOMENTUM(0.5), bound_by="communication",
    ),
    "fashion": Workload(
        "the CNN on Fashion-MNIST, SGD momentum, 64 samples per worker",
        64, dense.cnn, dense.clothes, F.cross_entropy, _MOMENTUM(0.05), test=dense.test_clothes, same_end=0.1,
    ),
    "wide": Workload(  # many parameters and few samples: what servers and networks have to do is most of a step
        "MLP 784-2048-2048-10, SGD momentum, 16 samples per worker",
        16, partial(dense.mlp, 2048), dense.vectors, F.cross_entropy, _MOMENTUM(0.005), bound_by="communication",
    ),
    "wide8": Workload(
        "MLP 784-2048-2048-10, SGD momentum, 8 samples per worker",
        8, partial(dense.mlp, 2048), dense.vectors, F.cross_entropy, _MOMENTUM(0.005), bound_by="communication",
    ),
}  # fmt: skip
