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
from distbelief.control.credentials import Authority, Credential
from distbelief.control.messages import Admit, Answer, Command, Event, JoinAgain, JoinRequested, decode_command, encode
from distbelief.control.sockets import dial
from distbelief.control.unreachable import unanswered
from distbelief.errors import DistBeliefError

ADVERTISEMENT = "coordinator.json"


@contextlib.contextmanager
def advertised(run_dir: Path, address: str, authority: Authority, epoch: int, host: str = "") -> Iterator[None]:
    """Within this context a process that may read the file in the run directory can reach the coordinator.

    The file opens this start of this run only: a secret from which more follows must not be in it.
    """
    path = run_dir / ADVERTISEMENT
    known = {"address": address, "start": authority.start, "host": host, "pid": os.getpid(), "epoch": epoch}
    secrets = {"run_secret": authority.secret.hex(), "coordinator_key": authority.coordinator_key.decode()}
    content = {**known, **secrets}
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
    answer = answer_of(address, authority.owner(), event, timeout_s, f"the coordinator of {run_dir}")
    if isinstance(answer, JoinAgain):
        raise of_another_start(address, str(run_dir))
    return answer


def of_another_start(address: str, run: str) -> DistBeliefError:
    """For a process whose `coordinator.json` is of another start, which the coordinator at that address answers."""
    return DistBeliefError(
        f"at {address} another run with the same key listens, or another start of {run}",
        hint="has the run ended? If it was started again at this moment, repeat the command",
    )


def answer_of(
    address: str, credential: Credential, event: Event, timeout_s: float, who: str = "the coordinator"
) -> Command | None:
    """Send one event to the coordinator at that address. Returns its answer; None: it cannot be read."""
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
    secret, coordinator_key = bytes.fromhex(content["run_secret"]), content["coordinator_key"].encode()
    return content["address"], Authority(secret, coordinator_key, content["start"])


def host_of_run(run_dir: Path) -> str:
    """The name of the machine on which that run was started."""
    return _advertisement(run_dir)["host"]


def _advertisement(run_dir: Path) -> dict[str, str]:
    try:
        content = json.loads((run_dir / ADVERTISEMENT).read_text())
        if "run_secret" not in content and "address" in content:
            raise DistBeliefError(
                f"the run in {run_dir} is led by another version of DistBelief", hint="use that version for it"
            )
        return {name: str(content[name]) for name in ("address", "run_secret", "coordinator_key", "start", "host")}
    except FileNotFoundError:
        if (run_dir / "journal.jsonl").exists():
            raise DistBeliefError(f"the run in {run_dir} is not running", hint="it has ended or was stopped") from None
        raise DistBeliefError(f"{run_dir} is no run directory", hint="give the folder that `train` printed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistBeliefError(f"cannot read {run_dir / ADVERTISEMENT}: {error}", hint="is it your run?") from error
