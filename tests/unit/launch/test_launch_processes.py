"""The environment of the process that workers are forked from."""

from __future__ import annotations

import pytest

from distbelief.launch.processes import zygote_environment


@pytest.mark.parametrize(
    ("strategy", "keeps"),
    [
        ("allreduce:gloo", True),
        ("ps:async", True),
        ("local_sgd:8", True),
        ("sandblaster", False),
        ("pipeline:2", False),
        ("dp2.fsdp2", False),
    ],
)
def test_the_strategy_says_whether_workers_keep_freed_memory(strategy: str, keeps: bool) -> None:
    assert ("GLIBC_TUNABLES" in zygote_environment(strategy, {})) == keeps
