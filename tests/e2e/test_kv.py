"""The key-value service with real processes: counts are exact while servers are killed, and strangers stay outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq

from distbelief import kv
from distbelief.errors import DistBeliefError
from distbelief.kv import store as kvstore
from distbelief.kv.messages import DeclareKey, Dense, PlaceKey
from tests.support.runs.command import Run

CLIENT = "tests.support.runs.kvclient"
PUSHES = 120
Wait = Callable[[Callable[[], object]], None]


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """One for the tests that disturb each other in nothing."""
    others = set(psutil.Process().children(recursive=True))
    with kv.serve(servers=2) as address:
        yield address
        here = [process for process in psutil.Process().children(recursive=True) if process not in others]
    _, alive = psutil.wait_procs(here, timeout=10)
    assert alive == [], "processes are left"
    assert not Path(address).parent.exists()


def command(process: psutil.Process) -> list[str]:
    """Of one that is alive."""
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


def servers(above: psutil.Process) -> list[psutil.Process]:
    """Whoever the warm process has forked."""
    found = [child for child in above.children(recursive=True) if "distbelief.launch.zygote" in command(child)]
    pids = {one.pid for one in found}
    return [child for child in found if child.ppid() in pids]


def test_counts_are_exact_while_servers_are_killed(service: str, tmp_path: Path, wait_until: Wait) -> None:
    signals = [tmp_path / "0", tmp_path / "1"]
    before = shared_values(psutil.Process())
    clients = [
        subprocess.Popen([sys.executable, "-m", CLIENT, service, str(rank), str(PUSHES), str(signals[rank])])
        for rank in (0, 1)
    ]
    try:
        wait_until(lambda: all(one.exists() for one in signals))
        for _ in range(2):
            victim, *others = servers(psutil.Process())
            victim.send_signal(signal.SIGKILL)
            log = Path(service).parent / "service.log"
            wait_until(lambda: f"pid {victim.pid}" in log.read_text())  # noqa: B023
            wait_until(lambda: settled(service, len(others) + 1))  # noqa: B023
        assert [client.wait(400) for client in clients] == [0, 0]
    finally:
        for client in clients:
            client.kill()
            client.wait()
    wait_until(lambda: shared_values(psutil.Process()) == before + 2 * 3)  # two holders of each stretch of `big`
    for shared in (True, False):
        with kv.connect(service, shared_memory=shared) as store:
            big, small = store.pull(["big", "small"])
            assert big.unique().tolist() == small.unique().tolist() == [2.0 * PUSHES]
            rows = store.row_sparse_pull("rows", [0, 1, 7, 999_999_999, 8])
            assert rows[:, 0].tolist() == [PUSHES, PUSHES, 2 * PUSHES, 2 * PUSHES, 0]


def shared_values(above: psutil.Process) -> int:
    """How many pieces of memory are kept in the name of servers."""
    (supervisor,) = [child for child in above.children() if "distbelief.kv" in command(child)]
    kept = 0
    for fd in Path(f"/proc/{supervisor.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            kept += os.readlink(fd).startswith("/memfd:server ")
    return kept


def settled(service: str, count: int) -> bool:
    """Whether every slice has its backup again: only then another death loses nothing."""
    with kv.connect(service) as store:
        known = store._transfers.client._newest
        return known is not None and len(known.addresses) == count and -1 not in known.backups


def test_an_optimizer_on_the_servers_has_the_bits_of_one_process(service: str) -> None:
    generator = torch.Generator().manual_seed(1)
    first = {"opt/a": torch.randn(700, 801, generator=generator), "opt/b": torch.randn(33, generator=generator)}
    with kv.connect(service) as store:
        store.init(list(first), list(first.values()))
        store.set_optimizer("adam", lr=0.01, weight_decay=0.1)
        whole = [torch.nn.Parameter(value.clone()) for value in first.values()]
        expected = torch.optim.Adam(whole, lr=0.01, weight_decay=0.1)
        for _ in range(4):
            for one in whole:
                one.grad = torch.randn(one.shape, generator=generator)
            store.push(list(first), [one.grad for one in whole])
            expected.step()
        out = torch.empty(801, 700).t()  # not in one piece
        found = [store.pull("opt/a", out=out), store.pull("opt/b")]
        assert found[0] is out
        store.set_optimizer(None)
    assert all(torch.equal(mine, one.detach()) for mine, one in zip(found, whole, strict=True))


def test_synchronous_workers_get_the_sum(service: str) -> None:
    with kv.connect(service, rank=0, workers=2, sync=True) as one:
        with kv.connect(service, rank=1, workers=2, sync=True) as other:
            one.init("sum", torch.zeros(100_000))
            other.push("sum", torch.full((100_000,), 2.0))
            other.wait()
            other._transfers.timeout_s = 0.5
            with pytest.raises(DistBeliefError, match="pushes of all 2 workers to 'sum' were not there in"):
                other.pull("sum")
            other._transfers.timeout_s = 60.0
            one.push("sum", torch.ones(100_000))
            assert one.pull("sum").unique().tolist() == other.pull("sum").unique().tolist() == [3.0]
        with kv.connect(service, rank=1, workers=2, sync=True) as replacement:
            for store in (one, replacement):
                store.push("sum", torch.ones(100_000))
            assert replacement.pull("sum").unique().tolist() == [2.0]


def test_a_barrier_says_who_is_missing(service: str) -> None:
    missing = r"workers 0, 2 of 3 did not reach the barrier in 0\.2 s"
    with kv.connect(service, rank=1, workers=3) as store, pytest.raises(DistBeliefError, match=missing):
        store.barrier(timeout_s=0.2)


def test_a_first_value_whose_giver_is_gone_is_given_by_another(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "TAKEN_OVER_AFTER_S", 0.3)
    with kv.connect(service) as dead, kv.connect(service) as store:
        transfers = dead._transfers
        transfers.change(DeclareKey(transfers.me, "orphan", Dense("float32", (3,))))
        store.init("orphan", torch.ones(3))
        place = PlaceKey("orphan", 0, Dense("float32", (3,)), 0, 3)  # it was not dead: but now it is too late
        for number in transfers.slices:
            transfers.client.push(number, place, torch.full((3,), 9.0).view(torch.uint8).numpy())
        transfers.settle()
        assert store.pull("orphan").tolist() == [1.0] * 3


def test_values_that_cannot_be_mapped_any_more_are_sent(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with kv.connect(service) as store:
        store.init("far", torch.arange(300_000.0))
        assert torch.equal(store.pull("far"), torch.arange(300_000.0))
        monkeypatch.setattr(store._transfers._buffers, "values", lambda *_: None)
        assert torch.equal(store.pull("far"), torch.arange(300_000.0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda store: store.pull("nothing"), "there is no key 'nothing'"),
        (
            lambda store: store.push("w", torch.ones(4)),
            r"'w' holds float32 numbers of shape \[3\], but the push of it has",
        ),
        (lambda store: store.push("w", torch.ones(3).double()), "but the push of it has float64"),
        (lambda store: store.pull("w", out=torch.ones(1)), "the output for it has"),
        (lambda store: store.init("w", torch.zeros(5)), "'w' exists already"),
        (lambda store: store.init("huge", torch.zeros(1).expand(10**12)), "there is no room for 'huge'"),
        (lambda store: store.init("i", torch.zeros(5).long()), "'i' has int64 numbers"),
        (lambda store: store.row_sparse_pull("w", [0]), "'w' is no table"),
        (lambda store: store.pull("t"), "'t' is a table"),
        (lambda store: store.row_sparse_pull("t", [0, 10]), "table 't' has no row 10: it has 10 rows"),
        (lambda store: store.push("t", torch.ones(1, 2), rows=[-1]), "has no row -1"),
        (lambda store: store.push("t", torch.ones(1, 2)), "which rows"),
        (lambda store: store.push(["w", "t"], [torch.ones(3)]), "2 keys need a list of 2"),
        (lambda store: store.set_optimizer("lion", lr=1), "no optimizer of servers is called 'lion'"),
        (lambda store: store.init_table("u", 10, 2, optimizer="rmsprop"), "no optimizer of sparse tables"),
    ],
)
def test_mistakes_are_said_in_words(mistaken: kv.Store, call: Callable[[kv.Store], Any], words: str) -> None:
    with pytest.raises(DistBeliefError, match=words) as caught:
        call(mistaken)
    assert caught.value.hint
    assert mistaken.pull("w").tolist() == [0.0] * 3  # it goes on


@pytest.fixture(scope="module")
def mistaken(service: str) -> Iterator[kv.Store]:
    with kv.connect(service) as store:
        store.init("w", torch.zeros(3))
        store.init_table("t", 10, 2, optimizer=None)
        yield store


def test_strangers_are_not_heard(service: str, tmp_path: Path) -> None:
    known = json.loads(Path(service).read_text())
    assert stat.S_IMODE(os.stat(service).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(Path(service).parent).st_mode) == 0o700
    assert not any(known["secret"] in " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True))
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({**known, "secret": "00" * 16}))
    with pytest.raises(DistBeliefError, match="no key-value service answers"):
        kv.connect(wrong, timeout_s=1.0)
    with kv.connect(service) as store:
        store.init("safe", torch.zeros(3))
        addresses = list(store._transfers.client._newest.addresses.values())  # type: ignore[union-attr]
        with zmq.Context() as context:
            for address in [known["address"], *addresses]:
                with context.socket(zmq.DEALER) as socket:
                    socket.setsockopt(zmq.LINGER, 1000)
                    socket.connect(address)
                    for frames in (
                        [b"x"],
                        [b"", b""],
                        [b"0" * 16, b"\x91\x80"],
                        [bytes.fromhex(known["secret"]), b"junk"],
                    ):
                        socket.send_multipart(frames)
                    assert not socket.poll(300)
        store.push("safe", torch.ones(3))
        assert store.pull("safe").tolist() == [1.0] * 3


def pull_for_ever(store: kv.Store) -> None:
    while True:
        store.pull("w")


def test_the_command_serves_until_ctrl_c(start: Callable[..., Run], tmp_path: Path, wait_until: Wait) -> None:
    run = start("kv", "--servers", 1, "--dir", "service", "--json")
    file = tmp_path / "service" / "kv.json"
    wait_until(file.exists)
    store = kv.connect(file)
    store.init("w", torch.zeros(3))
    (server,) = servers(psutil.Process(run._process.pid))
    server.kill()  # the only one
    with pytest.raises(DistBeliefError, match="the values of all keys are lost"):
        pull_for_ever(store)
    with pytest.raises(DistBeliefError, match="this store is closed"):
        store.pull("w")
    store.close()
    with kv.connect(file) as again:
        again.init("w", torch.ones(3))
        assert again.pull("w").tolist() == [1.0] * 3
        run.signal(signal.SIGINT)
        outcome = run.wait()
        with pytest.raises(DistBeliefError, match="the key-value service has ended"):
            pull_for_ever(again)
    assert outcome.status == 0
    assert outcome.json == {"file": str(file), "servers": 1}
    assert not file.exists()
