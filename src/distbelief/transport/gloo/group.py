"""A group of members over torch.distributed (gloo) whose waits can be aborted.

gloo cannot cancel a wait. So an abort shuts the group's sockets down: then every wait ends with an error, on this
member and on the members at the other ends. If gloo sleeps even then, its thread is left behind, and a second thread of
the process continues (`train_or_be_succeeded`).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from distbelief.instrument import Instrument
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.exchange import TRANSFER_BYTES, Backups, DiedComputing
from distbelief.transport.gloo.rendezvous import Rendezvous, RendezvousStore

_TRANSFER = (1 << 31) - 1  # a tag that no partial sum has: partial sums may be in flight
_AGAIN_S = 0.1
_MISSED_S = 3.0  # a wait whose sockets are closed ends within milliseconds, or never
_HOPELESS_S = 5.0  # used if giving up the wait ends the process
_ASLEEP_S = 30.0  # user code may sleep for a while
_OF_A_DEVICE = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""Errors of this member's own device. AcceleratorError is missing in the oldest supported torch."""
_SUCCEEDED = "gloo did not notice the end of a generation: its thread is left behind, another one continues"
_kept: list[dist.ProcessGroup] = []
"""Groups in which a thread still waits: their destructor would wait for that thread."""

TIMED = (Instrument("wait", __name__, "TorchGroup", ("gather",)),)


class _Thread:
    """The thread that constructs this object, observed from other threads while it lives."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._status = f"/proc/self/task/{threading.get_native_id()}/stat"

    def used_s(self) -> float:
        """Processor time of the thread."""
        return time.clock_gettime(self._clock)

    def sleeps(self) -> bool:
        """Whether the thread sleeps; waiting for a processor does not count."""
        with open(self._status) as status:
            return status.read().rpartition(")")[2].split()[0] == "S"


class TorchGroup:
    """A torch group, which is torch's default group of this process until it is closed. See `Group`."""

    shares_state = False
    waiting = False
    backups: Backups | None = None

    def __init__(self, rendezvous: Rendezvous, rank: int, size: int, abort: Abort, backend: str = "gloo") -> None:
        """`backend`: torch's name; "cpu:gloo,cuda:nccl" names one backend per device type."""
        self.rank = rank
        self.size = size
        self._abort = abort
        timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
        self._waits = 0
        self._guarding = False
        self._training_thread = _Thread()
        self._leaving = threading.Lock()
        self._backend = backend
        self._before = _open_sockets()
        self._sockets: set[tuple[int, int]] | None = None
        self._store: Store | None = None
        abort.wake = self._hang_up
        with self.network():
            self._store = rendezvous.store(abort)  # keep a reference: torch's own does not suffice
            self._arrive(rendezvous.name)
            # torch derives a group's name from this counter, which also counts aborted groups. Without a reset, members
            # would wait under different names.
            dist.distributed_c10d._world.group_count = 0
            try:
                dist.init_process_group(
                    backend,
                    store=PrefixStore(rendezvous.name, self._store),
                    rank=rank,
                    world_size=size,
                    timeout=timeout,
                    # NCCL then connects now, not in the middle of the first backward pass
                    device_id=torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else None,
                )
            except BaseException:
                self._close_store()
                raise
        self._sockets = _open_sockets() - self._before

    def _arrive(self, name: str) -> None:
        """Wait for all members. So all of them use the same rendezvous server, or learn that it was replaced, before
        torch lets one member rely on a key that another one reads later."""
        assert self._store is not None
        try:
            self._store.set(f"{name}: member {self.rank}", "here")
            self._store.wait([f"{name}: member {rank}" for rank in range(self.size)])
        except BaseException:
            self._close_store()
            raise

    @contextmanager
    def more_groups(self) -> Iterator[None]:
        """Context for creating subgroups: members connect again, and an abort ends that wait too."""
        with self.network():
            assert self._sockets is not None
            self._before = _open_sockets() - self._sockets
            self._sockets = None
            yield
        self._sockets = _open_sockets() - self._before

    def _hang_up(self) -> None:
        """Called by the control thread: end the training thread's wait."""
        threading.Thread(target=self._shut_down_repeatedly, args=[self._waits], daemon=True).start()
        if "nccl" in self._backend:  # NCCL's kernels wait on the device, and do not use these sockets
            with contextlib.suppress(RuntimeError, ValueError):
                dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()
        self._shut_down()

    def _shut_down(self) -> None:
        with self._leaving:
            if self._abort.left_behind or (self._sockets is None and not self.waiting):
                return  # the thread has left this group; new sockets may belong to the next group
            present = _open_sockets()
            for descriptor, identity in present - self._before if self._sockets is None else present & self._sockets:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    if os.fstat(connection.fileno()).st_ino != identity:
                        continue  # the descriptor now belongs to a socket of the next group
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if not listens:  # gloo dies with its listener
                        connection.shutdown(socket.SHUT_RDWR)

    def _shut_down_repeatedly(self, wait: int) -> None:
        """Shut the sockets down repeatedly: while members meet, gloo retries a failed connection with a new socket.
        Sometimes gloo sleeps even then (docs/decisions/0018)."""
        patience_s = _MISSED_S if self._abort.leave else _HOPELESS_S
        awake_at, used_s = time.monotonic(), 0.0
        while True:
            time.sleep(_AGAIN_S)
            with self._leaving:
                if not (self.waiting or self._guarding) or self._waits != wait:
                    return  # the thread may be gone
                now = time.monotonic()
                if used_s < (used_s := self._training_thread.used_s()) or not self._training_thread.sleeps():
                    awake_at = now
                if now - awake_at > (patience_s if self.waiting else _ASLEEP_S):
                    self._leave_behind()
                    return
            self._shut_down()

    def _leave_behind(self) -> None:
        # Inside `guard` the blocked code may be the user's; on waking it would run beside the successor thread.
        if self._abort.leave is None or not self.waiting:  # ends like a death; other members have the state
            print("gloo has missed the end of the group: this worker ends and is replaced", flush=True)
            os._exit(1)
        self._abort.left_behind = True
        self._abort.leave()

    def _come_too_late(self) -> None:
        """If a successor thread continues by now, stop this thread."""
        if self._abort.left_behind:
            self._close_store()
            raise Aborted(self._abort.reason)

    @contextmanager
    def network(self) -> Iterator[None]:
        """Use it around waits for other members. A broken connection means a lost member, not an error of user code:
        the coordinator decides what follows."""
        self._waits += 1
        self.waiting = True  # before the check: a later abort finds this thread waiting
        try:
            self._abort.check()
            yield
        except _OF_A_DEVICE:
            raise
        except (RuntimeError, dist.DistError) as error:
            what = str(error).partition(". This is typically")[0]
            raise Aborted(f"a connection between members broke: {what}") from error
        finally:
            with self._leaving:
                self.waiting = False
            self._come_too_late()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Use it around torch code that runs user code and waits for other members. Only connection errors, and errors
        after an abort, mean a lost member."""
        self._waits += 1
        self._guarding = True
        try:
            self._abort.check()
            yield
        except (RuntimeError, dist.DistError) as error:
            if self._abort.reason or "gloo" in str(error) or isinstance(error, dist.DistError):
                what = str(error).partition(". This is typically")[0]
                raise Aborted(f"a connection between members broke: {what}") from error
            raise
        finally:
            with self._leaving:
                self._guarding = False
            self._come_too_late()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Inside a guard, use it around code that waits for no member but may take long, for example for data."""
        with self._leaving:
            self._waits += 1
            self._guarding = False
        try:
            yield
        finally:
            with self._leaving:
                self._guarding = True
        self._abort.check()

    def died_computing(self) -> list[DiedComputing]:
        return []

    def gather(self, payload: bytes) -> list[bytes]:
        with self.network():
            length = torch.tensor([len(payload)])
            lengths = [torch.zeros_like(length) for _ in range(self.size)]
            dist.all_gather(lengths, length)
            longest = max(int(n) for n in lengths)
            box = torch.zeros(max(longest, 1), dtype=torch.uint8)
            box[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
            boxes = [torch.zeros_like(box) for _ in range(self.size)]
            dist.all_gather(boxes, box)
        return [bytes(b.numpy()[: int(n)].tobytes()) for b, n in zip(boxes, lengths, strict=True)]

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        with self.network():
            for first in range(0, block.numel(), TRANSFER_BYTES):
                part = block[first : first + TRANSFER_BYTES]
                if self.rank == source:
                    wait_all([dist.isend(part, receiver, tag=_TRANSFER) for receiver in receivers])
                elif self.rank in receivers:
                    dist.recv(part, source, tag=_TRANSFER)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._close_store()

    def _close_store(self) -> None:
        if isinstance(self._store, RendezvousStore):
            self._store.close()


def train_or_be_succeeded(train: Callable[[], None], abort: Abort, go_on: Callable[[], int]) -> None:
    """Run `train`. If gloo keeps its thread in spite of the abort, a second thread runs `go_on`, and the process ends
    with the status that `go_on` returns.

    gloo does not always wake a waiting thread when a connection ends (docs/decisions/0018). That thread is lost until
    gloo's own timeout, minutes later; the worker keeps its state and continues. This function then never returns, even
    if `train` wakes later."""
    cores, default_device = torch.get_num_threads(), torch.get_default_device()

    def succeed() -> None:
        status = 1
        try:
            torch.set_num_threads(cores)  # both settings belong to a thread, not to the process
            if default_device.type != "cpu":
                torch.set_default_device(default_device)
            _kept.extend(_forget_groups())
            print(_SUCCEEDED, flush=True)
            status = go_on()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    abort.leave = threading.Thread(target=succeed, name="training", daemon=True).start
    try:
        train()
    except BaseException:
        if not abort.left_behind:
            raise
    if abort.left_behind:
        threading.Event().wait()  # Python delivers signals to the main thread, so it must not end


def _forget_groups() -> list[dist.ProcessGroup]:
    """Remove torch's groups from this process, so that it can make new groups while a thread still waits in an old one.
    Returns the old groups: keep a reference until no thread waits in them, because their destructors wait for that
    thread."""
    kept = list(dist.distributed_c10d._world.pg_map)
    if dist.is_initialized():
        dist.destroy_process_group()
    return kept


def use_interface(name: str) -> None:
    """Have gloo use this network interface in all later groups of this process."""
    os.environ["GLOO_SOCKET_IFNAME"] = name


def wait_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _open_sockets() -> set[tuple[int, int]]:
    """(descriptor, identity) of every socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed by now
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
