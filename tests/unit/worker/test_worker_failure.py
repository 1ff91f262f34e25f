"""A worker's failure as its user reads it."""

from __future__ import annotations

import pytest

from distbelief.control.credentials import NO_CREDENTIAL
from distbelief.options import RunOptions
from distbelief.worker.failure import describe_failure
from distbelief.worker.spec import WorkerSpec


@pytest.mark.parametrize(
    ("strategy", "other"),
    [
        ("allreduce", "use another operation, or `--strategy allreduce:inexact`"),
        ("allreduce:nccl", "use another operation, or `--strategy allreduce:inexact:nccl`"),
        ("ps:sync", "use another operation, or a strategy that is not exact"),
    ],
)
def test_a_kernel_that_is_not_deterministic_has_a_way_out(strategy: str, other: str) -> None:
    spec = WorkerSpec(0, "here", "", NO_CREDENTIAL, "", RunOptions(workers=1, strategy=strategy))
    error = RuntimeError("upsample_linear1d_backward_out_cuda does not have a deterministic implementation, but …")
    failure = describe_failure(spec, error, -1, -1)
    assert failure.kind == "user"
    assert failure.hint.endswith(other)
