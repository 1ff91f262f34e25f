"""How an outside process reaches a run's coordinator: by a file in the run directory that only its owner may read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from distbelief.atomicfile import replace_file
from distbelief.control.credentials import Authority
from distbelief.control.messages import Admit, Answer, Command, Event, JoinRequested, decode_command, encode
from distbelief.control.sockets import dial
from distbelief.control.unreachable import unanswered
from distbelief.errors import DistBeliefError

ADVERTISEMENT = "coordinator.json"


@contextlib.contextmanager
def advertised(run_dir: Path, address: str, authority: Authority, epoch: int, host: str = "") -> Iterator[None]:
    """Within this context a process that may read the file in the run directory can reach the coordinator."""
    path = run_dir / ADVERTISEMENT
    known = {"address": address, "secret": authority.secret.hex(), "start": authority.start, "host": host}
    content = {**known, "pid": os.getpid(), "epoch": epoch}
    replace_file(path, json.dumps(content).encode(), private=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def ask(run_dir: Path, event: Event, timeout_s: float = 10.0) -> Answer:
    """Send one event to the run's coordinator and wait for its answer."""
    answer = _answer_to(run_dir, event, timeout_s)
    if isinstance(answer, Answer):
        return answer
    raise DistBeliefError(f"the coordinator of {run_dir} sent an unknown answer; is it another version?")


def ask_for_seat(run_dir: Path, pid: int, timeout_s: float = 10.0) -> int:
    """Ask for the number of one more worker in that run."""
    answer = _answer_to(run_dir, JoinRequested(pid), timeout_s)
    if isinstance(answer, Admit):
        return answer.worker
    why = answer.text if isinstance(answer, Answer) else "is it another version?"
    raise DistBeliefError(f"the run in {run_dir} admits no new worker: {why}")


def _answer_to(run_dir: Path, event: Event, timeout_s: float) -> Command | None:
    address, authority = whereabouts(run_dir)
    return answer_of(address, authority, event, timeout_s, f"the coordinator of {run_dir}")


def answer_of(
    address: str, authority: Authority, event: Event, timeout_s: float, who: str = "the coordinator"
) -> Command | None:
    """Send one event to the coordinator at that address. Returns its answer; None: it cannot be read."""
    credential = authority.owner()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        dial(socket, address, credential.coordinator_key)
        message = encode(event)
        socket.send_multipart([credential.signer().sign(message), message])
        if not socket.poll(int(timeout_s * 1000)):
            raise unanswered(address, credential.coordinator_key, who)
        with contextlib.suppress(msgspec.MsgspecError):
            return decode_command(socket.recv_multipart()[-1])
    return None


def whereabouts(run_dir: Path) -> tuple[str, Authority]:
    """The address of a running run's coordinator, and the authority to make credentials."""
    content = _advertisement(run_dir)
    return content["address"], Authority(bytes.fromhex(content["secret"]), content["start"])


def host_of_run(run_dir: Path) -> str:
    """The name of the machine on which that run was started."""
    return _advertisement(run_dir)["host"]


def _advertisement(run_dir: Path) -> dict[str, str]:
    try:
        content = json.loads((run_dir / ADVERTISEMENT).read_text())
        return {name: str(content[name]) for name in ("address", "secret", "start", "host")}
    except FileNotFoundError:
        if (run_dir / "journal.jsonl").exists():
            raise DistBeliefError(f"the run in {run_dir} is not running", hint="it has ended or was stopped") from None
        raise DistBeliefError(f"{run_dir} is no run directory", hint="give the folder that `train` printed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistBeliefError(f"cannot read {run_dir / ADVERTISEMENT}: {error}", hint="is it your run?") from error
