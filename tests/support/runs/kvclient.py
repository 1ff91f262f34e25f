"""A client process of the key-value tests: FILE RANK PUSHES SIGNAL. It pushes ones, and creates SIGNAL half-way."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from distbelief import kv


def main() -> None:
    file, rank, pushes, signal = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    with kv.connect(file, rank=rank, workers=2) as store:
        store.init(["big", "small"], [torch.zeros(600_000), torch.zeros(3, 5)])
        store.init_table("rows", 1_000_000_000, 2, optimizer=None, init="zeros")
        store.barrier()
        for number in range(pushes):
            store.push(["big", "small"], [torch.ones(600_000), torch.ones(3, 5)])
            store.push("rows", torch.ones(3, 2), rows=[rank, 7, 999_999_999])
            if number % 5 == rank:
                mine = store.pull("small")
                assert float(mine.min()) >= number + 1, "a client does not see what it has pushed"
            if number >= pushes // 4 and not signal.exists():
                signal.touch()
        store.barrier()


if __name__ == "__main__":
    main()
