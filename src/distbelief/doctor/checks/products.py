"""How fast matrices are multiplied, by torch's own library and by oneDNN: what `Job.matmul` chooses between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from distbelief.doctor.rules.finding import Finding, ok, skipped

SIDE = 512
TRIES = 7
WORTH_SAYING = 1.2


@dataclass(frozen=True)
class Products:
    """Floating-point operations a second, in one thread; 0: it could not be tried."""

    torch: float = 0.0
    onednn: float = 0.0


def probe() -> Products:
    try:
        return _measured()
    except Exception:  # the check of the software says why
        return Products()


def _measured() -> Products:
    import torch

    from distbelief.strategies.flatmodel.onednn import available, use_onednn

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, plain, ours = torch.ones(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE)
        if available():
            use_onednn(ours)
        with torch.no_grad():
            times = [(_seconds(lambda: plain(rows)), _seconds(lambda: ours(rows))) for _ in range(TRIES)]
    finally:
        torch.set_num_threads(threads)
    of_torch, of_onednn = (2 * SIDE**3 / min(some) for some in zip(*times, strict=True))
    return Products(of_torch, of_onednn if available() else 0.0)


def _seconds(multiply: Callable[[], object]) -> float:
    started = time.perf_counter()
    multiply()
    return time.perf_counter() - started


def judge(found: Products) -> Finding:
    about = "products"
    if not found.torch:
        return skipped(about, "torch does not work")
    text = f"of matrices, in one thread: {found.torch / 1e9:.0f} GFLOP/s by torch"
    if found.onednn:
        text += f", {found.onednn / 1e9:.0f} by oneDNN"
    if found.onednn > WORTH_SAYING * found.torch:
        text += '; Job(matmul="onednn") takes the faster one for linear layers'
    return ok(about, text)
