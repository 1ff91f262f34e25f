"""The real coordinator process, with real sockets on loopback in the roles of workers and engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from distbelief.comm import messages as m
from distbelief.coordinator import client, journal
from distbelief.errors import DistBeliefError

SECRET = bytes(range(m.SECRET_BYTES))
WAIT_MS = 60_000  # only reached when something is broken
JOB = m.JobFacts(name="digits", shards=4, steps=2, global_batch=8, samples=80, parameters=5, strategy="allreduce")
CANARY = m.Canary(fingerprint="c3d4", facts={"threads": "1"})


class Process:
    """A coordinator, and the means to talk to it."""

    def __init__(self, run_dir: Path, context: zmq.Context, config: dict, order: dict) -> None:
        self.run_dir = run_dir
        self.context = context
        self.sockets: list[zmq.Socket] = []
        self.errors = run_dir / "coordinator.log"
        with self.errors.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distbelief.coordinator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        line = {"run_dir": str(run_dir), "secret": SECRET.hex(), "listen": "tcp://127.0.0.1:*", "config": config}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**line, **order}).encode() + b"\n")
        self.process.stdin.flush()
        self.answer = json.loads(self.process.stdout.readline())

    def dealer(self) -> zmq.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.connect(self.answer["address"])
        self.sockets.append(socket)
        return socket

    def wait(self) -> int:
        return self.process.wait(timeout=60)

    def until_it_says(self, text: str) -> None:
        give_up = time.monotonic() + WAIT_MS / 1000
        while text not in self.errors.read_text():
            assert time.monotonic() < give_up, f"never said: {text}"
            time.sleep(0.01)

    def records(self) -> list[dict]:
        return journal.read(self.run_dir / "journal.jsonl")

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def coordinator(run_dir: Path, order: dict | None = None, **config: object) -> Iterator[Process]:
    with zmq.Context() as context:
        process = Process(run_dir, context, {"workers": 2, **config}, order or {})
        try:
            yield process
        finally:
            for socket in process.sockets:
                socket.close(linger=0)
            process.process.kill()
            process.process.wait()
            for pipe in (process.process.stdin, process.process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]


def tell(socket: zmq.Socket, event: m.Event, secret: bytes = SECRET) -> None:
    socket.send_multipart([secret, m.encode(event)])


def told(socket: zmq.Socket) -> m.Command:
    (data,) = socket.recv_multipart()
    return m.decode_command(data)


def engine_and_workers(process: Process) -> tuple[zmq.Socket, list[zmq.Socket]]:
    engine = process.dealer()
    tell(engine, m.EngineAttached(host="here"))
    # Nothing answers an engine, so let it say something that is answered: then it has been heard.
    tell(engine, m.WorkerReady(worker=88, job=JOB, canary=CANARY))
    assert isinstance(told(engine), m.Introduce)
    workers = [process.dealer(), process.dealer()]
    for number, socket in enumerate(workers):
        tell(socket, m.WorkerJoined(worker=number, host="here", pid=1000 + number))
        tell(socket, m.WorkerReady(worker=number, job=JOB, canary=CANARY))
    return engine, workers


def beat(worker: int, start: m.Command, step: int) -> m.Heartbeat:
    assert isinstance(start, m.StartGeneration)
    reports = [] if worker else [m.StepReport(step - 1, 0.5, 8, f"f{step}", 1.0)]
    return m.Heartbeat(worker, start.epoch, start.generation, step, m.Timing(0.1, 0.2, 0.3, 2 * step), reports)


def finish(worker: int, generation: int = 1) -> m.WorkerFinished:
    return m.WorkerFinished(worker, generation, 2, "" if worker else "abcd", 0.25, {"accuracy": 1.0}, 100.0)


@pytest.mark.parametrize("disturbed", [False, True])
def test_a_whole_run(tmp_path: Path, disturbed: bool) -> None:
    with coordinator(tmp_path) as process:
        assert process.answer["epoch"] == 1
        assert process.answer["address"].startswith("tcp://127.0.0.1:")
        if disturbed:
            stranger = process.dealer()
            tell(stranger, m.StopRequested("I do not like it"), secret=b"x" * m.SECRET_BYTES)
            tell(stranger, m.StopRequested("nor this"), secret=b"")
            stranger.send_multipart([SECRET, b"\xc1garbage"])
            stranger.send_multipart([SECRET, b"\x81\xa4type\xa7Unknown"])
            stranger.send(b"one frame")
            stranger.send_multipart([SECRET, m.encode(m.StopRequested("three")), b"frames"])
            # A real event, but out of place, is said at once: by then all that came before it has been dropped.
            tell(stranger, m.WorkerFinished(worker=77, generation=1, step=2))
            process.until_it_says("WorkerFinished makes no sense while gathering")
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
            tell(stranger, m.StopRequested("still not"), secret=b"y" * m.SECRET_BYTES)
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
        last = at_the_end[-1]
        assert last["kind"] == "workers"
        assert [worker["step"] for worker in last["workers"]] == [2, 2]
        log = process.errors.read_text()
        if disturbed:
            dropped = re.search(r"dropped (\d+) messages that were not from this run", log)
            assert dropped is not None
            assert int(dropped.group(1)) >= 6
        else:
            assert "not from this run" not in log


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


def test_a_killed_worker_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        first = [told(socket) for socket in workers][0]
        assert isinstance(first, m.StartGeneration)
        tell(engine, m.WorkerExited(worker=1, status=-9))
        start = told(workers[0])
        assert isinstance(start, m.StartGeneration)
        assert (start.generation, [member.worker for member in start.members]) == (2, [0])
        assert start.past == [m.PastGeneration(1, first.members)]
        assert told(engine) == m.StartWorker(epoch=1, worker=2)
        assert [record["kind"] for record in process.records()][-3:] == ["lost", "generation", "hired"]
        assert "worker 1 (host here, pid 1001) was killed by SIGKILL" in process.records()[-2]["reason"]


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
        assert "engine" in end.reason
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


def test_a_killed_coordinator_is_replaced_at_the_same_address_and_knows_the_run(tmp_path: Path) -> None:
    with coordinator(tmp_path) as first:
        engine, workers = engine_and_workers(first)
        start = [told(socket) for socket in workers][0]
        tell(workers[0], beat(0, start, 1))
        tell(engine, m.WorkerExited(worker=1, status=-9))
        assert isinstance(told(workers[0]), m.StartGeneration)  # recorded by then, and the step's line is in the file
        first.process.kill()
        first.process.wait()
        with coordinator(tmp_path, order={"listen": first.answer["address"]}) as second:
            assert second.answer == {"address": first.answer["address"], "epoch": 2}
            # The old connections find the new coordinator; what was lost in between is told again and again.
            tell(workers[0], m.Heartbeat(0, 1, 2, 1, m.Timing()))
            while not isinstance(answer := told(workers[0]), m.Introduce):
                pass
            assert answer == m.Introduce(epoch=2, reported=1)
            tell(workers[0], m.WorkerJoined(worker=0, host="here", pid=1000))
            tell(workers[0], m.WorkerReady(worker=0, job=JOB, canary=CANARY))
            tell(workers[0], m.Heartbeat(0, 2, 1, 1, m.Timing()))
            again = told(workers[0])
            assert isinstance(again, m.StartGeneration)
            assert (again.epoch, again.generation, [one.worker for one in again.members]) == (2, 2, [0])
            reports = [m.StepReport(step, 0.5, 8, f"f{step + 1}", 1.0, 2) for step in (0, 1)]
            tell(workers[0], m.Heartbeat(0, 2, 2, 2, m.Timing(), reports))
            tell(workers[0], finish(0, generation=2))
            assert second.wait() == 0
            assert [line["step"] for line in second.metrics() if line["kind"] == "step"] == [0, 1]
            assert [r["generation"] for r in second.records() if r["kind"] == "generation"] == [1, 2]
            assert [r["epoch"] for r in second.records() if r["kind"] == "epoch"] == [1, 2]


def test_whoever_may_read_the_run_directory_can_ask_for_another_number_of_workers(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="is no run directory"):
        client.ask(tmp_path, m.ScaleRequested(workers=3))
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        for socket in workers:
            told(socket)
        told_of = tmp_path / "coordinator.json"
        assert told_of.stat().st_mode & 0o777 == 0o600
        assert json.loads(told_of.read_text()) == {
            "address": process.answer["address"],
            "secret": SECRET.hex(),
            "pid": process.process.pid,
            "epoch": 1,
        }
        answer = client.ask(tmp_path, m.ScaleRequested(workers=3), timeout_s=60)
        assert answer == m.Answer(epoch=1, ok=True, text="1 more worker is being started")
        assert told(engine) == m.StartWorker(epoch=1, worker=2)
        assert not client.ask(tmp_path, m.ScaleRequested(workers=0), timeout_s=60).ok
        assert client.ask_for_seat(tmp_path, os.getpid(), timeout_s=60) == 3
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not told_of.exists()
        with pytest.raises(DistBeliefError, match="is not running"):
            client.ask(tmp_path, m.ScaleRequested(workers=3))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"config": {"workers": 0}}, "workers must be at least 1"),
        ({"config": {"wrokers": 1}}, "unknown field"),
        ({"secret": "00"}, "secret"),
        ({"listen": "tcp://0.0.0.0:*"}, "loopback only"),
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


def test_a_full_disk_ends_the_run_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        start = told(workers[0])
        tell(workers[0], beat(0, start, 1))
        end = told(engine)
        assert isinstance(end, m.EndRun)
        assert end.status == "failed"
        assert "No space left on device" in end.reason
        assert process.wait() == 1
        assert process.records()[-1]["failure"]["kind"] == "coordinator"


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
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


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
