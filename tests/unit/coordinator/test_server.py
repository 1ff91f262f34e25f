"""The real coordinator process, with real sockets on loopback in the roles of workers and engine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from distbelief.control import messages as m
from distbelief.control.credentials import KeyAuthority
from distbelief.launch.rules.restarting import HOPELESS_S
from distbelief.worker.link import LEASE_S
from tests.support.coordinator.process import (
    AUTHORITY,
    SECRET,
    WAIT_MS,
    attach,
    beat,
    coordinator,
    engine_and_workers,
    finish,
    signer,
    tell,
    told,
)

STRANGER = KeyAuthority(b"x" * m.SECRET_BYTES).run.owner()


@pytest.mark.parametrize("disturbed", [False, True])
def test_a_whole_run(tmp_path: Path, disturbed: bool) -> None:
    with coordinator(tmp_path) as process:
        assert process.answer["epoch"] == 1
        assert process.answer["address"].startswith("tcp://127.0.0.1:")
        if disturbed:
            stranger = process.dealer()
            tell(stranger, m.StopRequested("I do not like it"), STRANGER)
            stranger.send_multipart([SECRET, m.encode(m.StopRequested("nor this"))])
            mine = signer(AUTHORITY.worker(7))
            for data in (b"\xc1garbage", b"\x81\xa4type\xa7Unknown"):
                stranger.send_multipart([mine.sign(data), data])
            stranger.send(b"one frame")
            three = m.encode(m.StopRequested("three"))
            stranger.send_multipart([mine.sign(three), three, b"frames"])
            # A real event, but out of place, is said at once: by then all that came before it has been dropped.
            tell(stranger, m.WorkerFinished(worker=77, generation=1, step=2))
            process.until_it_says("WorkerFinished of worker 77, which has not joined")
        engine, workers = engine_and_workers(process)
        starts = [told(socket) for socket in workers]
        members = [m.Member(0, "here", (0, 2), 1000), m.Member(1, "here", (2, 4), 1001)]
        expected = m.StartGeneration(1, 1, members, "shm")
        assert starts == [expected, expected]
        assert process.records()[-1]["kind"] == "generation", "recorded before anybody was told"
        for step in (1, 2):
            for number, socket in enumerate(workers):
                tell(socket, beat(number, starts[number], step))
        if disturbed:
            tell(stranger, m.StopRequested("still not"), STRANGER)
            tell(stranger, m.WorkerFinished(worker=78, generation=1, step=2))
            process.until_it_says("WorkerFinished of worker 78, which has not joined")
        for number, socket in enumerate(workers):
            tell(socket, finish(number))
        ends = [told(socket) for socket in (*workers, engine)]
        assert all(isinstance(end, m.EndRun) and end.status == "completed" for end in ends)
        at_the_end = process.metrics()
        assert process.wait() == 0

        records = process.records()
        assert [record["kind"] for record in records] == ["epoch", "reference", "generation", "ended"]
        assert all(record["reason"] for record in records)
        assert records[-1]["result"]["weights_sha256"] == "abcd"
        assert records[-1]["result"]["workers"] == 2
        steps = [(line["step"], line["fingerprint"]) for line in process.metrics() if line["kind"] == "step"]
        assert steps == [(0, "f1"), (1, "f2")]
        assert at_the_end == process.metrics(), "who hears of the end finds all lines in the file"
        last = [line for line in at_the_end if line["kind"] == "workers"][-1]
        assert [worker["step"] for worker in last["workers"]] == [2, 2]
        log = process.errors.read_text()
        if disturbed:
            last = re.findall(r"refused (\d+) messages: (.+)", log)[-1]
            assert int(last[0]) == 9
            assert sorted(last[1].split(", ")) == ["2 malformed", "2 unexpected", "2 wrongly signed", "3 unsigned"]
            assert [line["counts"] for line in at_the_end if line["kind"] == "refused"]
        else:
            assert "not from this run" not in log


def test_who_has_sent_a_message_that_is_too_long_is_named(tmp_path: Path) -> None:
    """Our own senders send none. The sender stays connected."""
    with coordinator(tmp_path) as process:
        long = process.dealer()
        mine = signer(AUTHORITY.worker(3))
        data = msgspec.msgpack.encode(m.WorkerFailed(3, "here", "user", "x" * m.MAX_EVENT_BYTES))
        long.send_multipart([mine.sign(data), data])
        process.until_it_says("dropped a message of 2.1 MB of worker 3")
        tell(long, m.WorkerFinished(worker=3, generation=1, step=2))
        process.until_it_says("WorkerFinished of worker 3, which has not joined")
        process.until_it_says("1 too long")


def test_a_failure_reaches_everybody(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        for socket in workers:
            told(socket)
        tell(engine, m.WorkerExited(worker=1, status=3))
        failure = m.WorkerFailed(worker=1, host="here", kind="user", message="boom", traceback="line 1\nline 2")
        tell(workers[1], failure)
        assert told(engine) == m.EndRun(epoch=1, status="failed", reason="boom")
        assert told(workers[0]) == m.EndRun(epoch=1, status="failed", reason="boom")
        assert process.wait() == 0
        assert process.records()[-1]["failure"]["traceback"] == "line 1\nline 2"


def test_sigterm_stops_and_sigint_does_not(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        for socket in workers:
            told(socket)
        process.process.send_signal(signal.SIGINT)
        process.process.send_signal(signal.SIGTERM)
        assert told(workers[0]) == m.EndRun(epoch=1, status="stopped", reason="SIGTERM")
        assert told(engine) == m.EndRun(epoch=1, status="stopped", reason="SIGTERM")
        assert process.wait() == 0
        assert process.records()[-1]["status"] == "stopped"


def test_it_ends_when_the_engine_is_gone(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        _, workers = engine_and_workers(process)
        for socket in workers:
            told(socket)
        process.process.stdin.close()  # type: ignore[union-attr]
        end = told(workers[1])
        assert isinstance(end, m.EndRun)
        assert end.reason == "the process that started the run is gone"
        assert process.wait() == 0


def test_it_dies_with_a_killed_engine(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'distbelief.coordinator'], stdin=sys.stdin)\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    order = {"run_dir": str(tmp_path), "secret": SECRET.hex(), "config": {"workers": 1}}
    engine = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write(json.dumps(order).encode() + b"\n")
    engine.stdin.flush()
    child = int(engine.stdout.readline())
    assert "address" in json.loads(engine.stdout.readline())
    gone = os.pidfd_open(child)
    engine.kill()
    engine.wait()
    try:
        # Our end of stdin is still open, so only the death of the parent can have ended it.
        poller = zmq.Poller()
        poller.register(gone, zmq.POLLIN)
        assert poller.poll(WAIT_MS)
    finally:
        os.close(gone)
        engine.stdin.close()
        engine.stdout.close()


def test_a_second_coordinator_of_the_same_run_is_refused(tmp_path: Path) -> None:
    with coordinator(tmp_path) as first:
        with coordinator(tmp_path) as second:
            assert "another coordinator is running this run" in second.answer["error"]
            assert "--run-dir" in second.answer["hint"]
            assert second.wait() == 1
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 0
    with coordinator(tmp_path) as third:
        assert third.answer["epoch"] == 2


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"config": {"workers": 0}}, "workers must be at least 1"),
        ({"config": {"wrokers": 1}}, "unknown field"),
        ({"secret": "00"}, "secret"),
        ({"listen": "tcp://127.0.0.1:nonsense"}, "cannot listen"),
        ({"run_dir": "/nowhere/at/all"}, "cannot write the journal"),
    ],
)
def test_a_wrong_order_is_answered_with_a_clear_error(tmp_path: Path, order: dict, words: str) -> None:
    with coordinator(tmp_path, order=order) as process:
        assert words in process.answer["error"]
        assert process.wait() == 1


def test_metrics_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with coordinator(tmp_path) as process:
        assert "metrics.jsonl" in process.answer["error"]
        assert process.wait() == 1


def test_a_decision_waits_for_room_on_the_disk_and_nothing_is_carried_out_before(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        starts = [told(socket) for socket in workers]
        before = process.limit_files(to_their_size=True)
        for step in (1, 2):
            tell(workers[0], beat(0, starts[0], step))
        facts = process.dealer()
        while (tell(facts, m.FactsAsked()) or told(facts)).step < 2:  # it has heard both
            pass
        tell(engine, m.WorkerExited(worker=1, status=-9))
        process.until_it_says("waits 1800 s for room")
        for _ in range(3):  # it is not silent, and takes what it is told
            tell(workers[0], beat(0, starts[0], 2))
            attach(engine)
        assert process.records()[-1]["kind"] == "generation", "the death is not recorded"
        assert not workers[0].poll(0), "and nobody was told"
        for request, is_kept in ((m.CheckpointRequested(), True), (m.JoinRequested(pid=1), False)):
            tell(facts, request)
            answer = told(facts)
            assert (answer.ok, "waits for room" in answer.text) == (is_kept, True)
        process.limit_files(before)
        assert "without checkpoints" in told(facts).text, "it is handled when there is room"
        assert not facts.poll(0)
        command = told(workers[0])
        assert isinstance(command, m.StartGeneration)
        assert [one["lost"] for one in process.records() if one["kind"] == "generation"] == [[], [1]]
        tell(workers[0], finish(0, command.generation))
        assert process.wait() == 0
        assert [line["step"] for line in process.metrics() if line["kind"] == "step"] == [0, 1], "no line was lost"
        said = [line["text"] for line in process.metrics() if line["kind"] == "notice"]
        assert any("the journal can be written again" in text for text in said)
        assert any("metrics.jsonl can be written again" in text and "no line was lost" in text for text in said)


def test_a_disk_that_stays_full_ends_the_run_and_all_are_told(tmp_path: Path) -> None:
    with coordinator(tmp_path, order={"room_wait_s": 0.1}) as process:
        engine, workers = engine_and_workers(process)
        for socket in workers:
            told(socket)
        process.limit_files(to_their_size=True)
        tell(engine, m.WorkerExited(worker=1, status=-9))
        for socket in (engine, workers[0]):
            end = told(socket)
            while isinstance(end, m.Answer):  # it lives
                end = told(socket)
            assert isinstance(end, m.EndRun)
            assert end.status == "failed"
            assert "File too large" in end.reason
        assert process.wait() == 1
        assert process.records()[-1]["kind"] == "generation", "the journal is whole"


def test_a_coordinator_that_waits_for_room_still_ends_with_the_run(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        for socket in workers:
            told(socket)
        process.limit_files(to_their_size=True)
        tell(engine, m.WorkerExited(worker=1, status=-9))
        process.until_it_says("waits 1800 s for room")
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 1


def test_a_coordinator_that_starts_again_waits_for_room(tmp_path: Path) -> None:
    with coordinator(tmp_path) as first:
        for socket in engine_and_workers(first)[1]:
            told(socket)
    whole = (tmp_path / "journal.jsonl").stat().st_size
    with coordinator(tmp_path, most_file_bytes=whole) as second:
        second.until_it_says(f"waits {min(HOPELESS_S, LEASE_S):.0f} s for room")
        assert second.answer is None
        second.limit_files(-1)
        second.until_it_answers()
        assert second.answer["epoch"] == 2


def test_a_disk_that_is_full_before_the_run_is_told_at_once(tmp_path: Path) -> None:
    with coordinator(tmp_path, most_file_bytes=10) as process:
        process.until_it_answers()
        assert "cannot write the journal" in process.answer["error"]
        assert "File too large" in process.answer["error"]
        assert process.wait() == 1


def test_half_a_metrics_line_of_a_killed_coordinator_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"step","st')
    with coordinator(tmp_path) as process:
        _, workers = engine_and_workers(process)
        start = told(workers[0])
        tell(workers[0], beat(0, start, 1))
        for number, socket in enumerate(workers):
            tell(socket, finish(number))
        assert process.wait() == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"kind":"step","st'
    assert json.loads(lines[1])["kind"] == "step"


def test_a_message_that_is_too_large_hurts_only_its_sender(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        stranger = process.dealer()
        stranger.send_multipart([SECRET, bytes((16 << 20) + 1)])
        _, workers = engine_and_workers(process)
        assert all(isinstance(told(socket), m.StartGeneration) for socket in workers)


def test_the_coordinator_starts_without_torch() -> None:
    script = (
        "import sys, distbelief.coordinator.server, distbelief.coordinator.__main__; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_the_coordinator_asks_every_strategy_without_torch() -> None:
    script = """
import sys
from distbelief.coordinator.rules.vocabulary import RunConfig
asked = {}
for text in ("allreduce", "local_sgd:8", "ps:async:n_push=4", "sandblaster", "tensor:2", "sharded", "dp2.pp2"):
    config = RunConfig(workers=4, strategy=text)
    asked[text] = config.wish is not None, config.stride, config.unit, config.balances
assert "torch" not in sys.modules
assert asked["allreduce"] == (False, 1, "shard", True)
assert asked["local_sgd:8"] == (False, 8, "replica", True)
assert asked["sandblaster"][2] == "portion"
assert asked["dp2.pp2"] == (True, 1, "shard", False)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_idle_coordinator_is_nearly_free(tmp_path: Path) -> None:
    """It polls and sleeps: a second of waiting must not be a second of processor time."""
    with coordinator(tmp_path) as process:
        ticks = os.sysconf("SC_CLK_TCK")

        def used_s() -> float:
            fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / ticks

        before, began = used_s(), time.monotonic()
        time.sleep(1.0)
        assert used_s() - before < 0.5 * (time.monotonic() - began)
