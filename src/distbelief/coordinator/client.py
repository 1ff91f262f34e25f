"""How an outside process reaches a run's coordinator: by a file in the run directory that only its owner may read."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq
from msgspec import Struct

from distbelief.atomicfile import replace_file
from distbelief.control.addresses import host_name, split
from distbelief.control.credentials import Authority, Credential
from distbelief.control.messages import Admit, Answer, Command, Event, JoinAgain, JoinRequested, decode_command, encode
from distbelief.control.sockets import dial
from distbelief.control.unreachable import unanswered
from distbelief.errors import DistBeliefError

ADVERTISEMENT = "coordinator.json"
_KEY_CHARACTERS = 40
"""Of a public key, as ZeroMQ writes it."""


class Advertisement(Struct, frozen=True):
    """What coordinator.json holds."""

    address: str
    start: str
    run_secret: str
    """In hexadecimal."""
    coordinator_key: str
    host: str = ""
    pid: int = 0
    epoch: int = 0
    launcher: int = 0
    """The process id of the launching process, which starts another coordinator when this one dies."""
    processes: str = ""
    """Where these process ids count: the same for all processes of one container of one start of a machine."""

    def __post_init__(self) -> None:
        split(self.address)
        bytes.fromhex(self.run_secret)
        if not self.address.startswith("tcp://") or len(self.coordinator_key) != _KEY_CHARACTERS:
            raise ValueError("the address or the coordinator's key is none")


@contextlib.contextmanager
def advertised(run_dir: Path, address: str, authority: Authority, epoch: int, host: str = "") -> Iterator[None]:
    """Within this context a process that may read the file in the run directory can reach the coordinator.

    The file opens this start of this run only: a secret from which more follows must not be in it.
    """
    path = run_dir / ADVERTISEMENT
    known = Advertisement(
        address=address,
        start=authority.start,
        run_secret=authority.secret.hex(),
        coordinator_key=authority.coordinator_key.decode(),
        host=host,
        pid=os.getpid(),
        epoch=epoch,
        launcher=os.getppid(),
        processes=_processes(),
    )
    replace_file(path, msgspec.json.encode(known), private=True)
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
    if _has_died(run_dir):
        raise died(run_dir)
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
    known = _advertisement(run_dir)
    return known.address, Authority(bytes.fromhex(known.run_secret), known.coordinator_key.encode(), known.start)


def host_of_run(run_dir: Path) -> str:
    """The name of the machine on which that run was started."""
    return _advertisement(run_dir).host


def died(run_dir: Path) -> DistBeliefError:
    return DistBeliefError(
        f"the run in {run_dir} is not running, and did not end in order",
        hint=f"if nothing else runs it, go on with `distbelief resume {shlex.quote(str(run_dir))}`",
    )


def seems_gone(run_dir: Path) -> bool:
    """Whether the run has no coordinator, as far as files and this host's processes show.

    A coordinator that is restarted is gone for a moment too. Of a coordinator on another host, or in another container,
    nothing is known.
    """
    known = _left_by_a_process_here(run_dir)
    if known is None:
        return not (run_dir / ADVERTISEMENT).exists()
    return b"distbelief.coordinator" not in _command_of(known.pid)


def _has_died(run_dir: Path) -> bool:
    """Whether the coordinator is gone and so is the launching process, which would start another coordinator."""
    known = _left_by_a_process_here(run_dir)
    return known is not None and seems_gone(run_dir) and known.launcher > 0 and not _command_of(known.launcher)


def _left_by_a_process_here(run_dir: Path) -> Advertisement | None:
    """None also for a file that is not there, or that another user owns."""
    try:
        known = msgspec.json.decode((run_dir / ADVERTISEMENT).read_bytes(), type=Advertisement)
    except (OSError, ValueError, DistBeliefError):
        return None
    is_here = known.processes == _processes() if known.processes else known.host == host_name()
    return known if is_here else None


def _command_of(pid: int) -> bytes:
    """Empty also for a process that has ended and whose parent has not noticed."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _processes() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _advertisement(run_dir: Path) -> Advertisement:
    path = run_dir / ADVERTISEMENT
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if (run_dir / "journal.jsonl").exists():
            raise DistBeliefError(f"the run in {run_dir} is not running", hint="it has ended or was stopped") from None
        raise DistBeliefError(f"{run_dir} is no run directory", hint="give the folder that `train` printed") from None
    except OSError as error:
        raise DistBeliefError(f"cannot read {path}: {error.strerror}", hint="is it your run?") from error
    try:
        return msgspec.json.decode(content, type=Advertisement)
    except (ValueError, DistBeliefError) as error:  # msgspec's errors are ValueErrors too
        raise DistBeliefError(
            f"{path} cannot be used: {error}",
            hint="is the run led by another version of DistBelief? Use that version for it. The file may also be "
            "damaged: the coordinator writes it anew when it is killed",
        ) from error
