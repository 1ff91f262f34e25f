"""The store that users call, and `kv.connect`, which makes it. It checks arguments; `Transfers` sends."""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from distbelief.control.credentials import KeyAuthority
from distbelief.errors import DistBeliefError
from distbelief.kv.checks import (
    describe,
    form_of,
    output_tensor,
    pair_up,
    require_dense,
    require_like,
    require_table,
    row_gradients,
    row_numbers,
)
from distbelief.kv.keyoptimizer import optimizer_spec, row_optimizer
from distbelief.kv.messages import (
    CATALOGUE,
    MESSAGES,
    Arrive,
    DeclareKey,
    Dense,
    Entry,
    Form,
    PlaceKey,
    Rows,
    SealKey,
    SetOptimizer,
    Withdraw,
)
from distbelief.kv.service import Connection, read_connection_file, this_boot
from distbelief.kv.supervisorlink import CallTimedOut, SupervisorLink
from distbelief.kv.transfers import PushBuffers, Transfers, bytes_of
from distbelief.strategies.ps.protocol.client import ServerClient
from distbelief.strategies.tables.rowinit import RowInit, TableForm
from distbelief.transport.abort import Aborted
from distbelief.transport.shm.segment import SegmentClient

_LOST = "the values of all keys are lost: the servers that had them died before others had a copy"
TAKEN_OVER_AFTER_S = 20.0
"""A client takes over giving a first value after this wait, which doubles with each attempt."""


def connect(
    address: str | Path,
    *,
    rank: int = 0,
    workers: int = 1,
    sync: bool = False,
    timeout_s: float = 60.0,
    shared_memory: bool = True,
) -> Store:
    """Connect to a key-value service. `address` is its connection file: `kv.serve` gives it, `distbelief kv` prints it.

    `rank` and `workers` are the number of this worker and of all workers: for `barrier`, and for `sync=True`, where
    the servers apply pushes of a key when every worker has pushed it. A call that takes longer than `timeout_s` raises.
    If the servers are on this machine, values stay in shared memory, unless `shared_memory` is False.

    >>> import torch
    >>> from distbelief import kv
    >>> with kv.serve(servers=1) as address, kv.connect(address) as store:
    ...     store.init("w", torch.zeros(3))
    ...     store.set_optimizer("sgd", lr=0.5)
    ...     store.push("w", torch.ones(3))
    ...     store.pull("w")
    tensor([-0.5000, -0.5000, -0.5000])
    """
    if workers < 1 or not 0 <= rank < workers:
        raise DistBeliefError(f"there is no rank {rank} among {workers} workers", hint="ranks go from 0 to workers - 1")
    known = read_connection_file(Path(address))
    authority = KeyAuthority(bytes.fromhex(known.secret)).run
    link = SupervisorLink(known.address, authority.owner())
    welcome = link.begin(timeout_s)
    client = ServerClient(authority.worker(welcome.client), MESSAGES)
    buffers = PushBuffers(welcome.client, _segment_client(known) if shared_memory else None)
    who = (rank, workers, sync)
    transfers = Transfers(client, link, buffers, who, welcome.client, welcome.slices, timeout_s)
    try:
        link.tell(client.learn)
        client.slices(transfers.deadline("no map of the servers came"))
    except BaseException:
        transfers.close()
        raise
    return Store(transfers, rank, workers)


def _segment_client(known: Connection) -> SegmentClient | None:
    """A client of the service's shared memory; None: the servers are on another machine, or share none."""
    if not known.segment_socket or known.boot != this_boot():
        return None
    sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):
        sock.connect(known.segment_socket)
        return SegmentClient(sock)
    sock.close()
    return None


class Store:
    """A client of a key-value service; made by `kv.connect`. Any thread may use it; calls come one after the other."""

    def __init__(self, transfers: Transfers, rank: int, workers: int) -> None:
        self.rank = rank
        self.workers = workers
        self._transfers = transfers
        self._entries: dict[str, Entry] = {}
        self._lock = threading.RLock()
        self._over = ""

    def init(self, key: str | Sequence[str], value: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Give keys their first values. If several workers do, the value of the first one counts. Returns when every
        server has the value."""
        with self._calling():
            given = pair_up(key, value, "values")
            self._begin({one: (form_of(one, first), first) for one, first in given})

    def init_table(
        self,
        key: str,
        rows: int,
        width: int,
        *,
        optimizer: str | None,
        init: str = "normal",
        scale: float = 0.01,
        seed: int = 0,
        **numbers: Any,
    ) -> None:
        """Declare a table of float32 rows that take memory once they were pushed to.

        Rows begin as `init` says ("normal", "uniform", "zeros"). The table's own `optimizer` ("sgd", "adagrad",
        "adam" with lr=…, row by row) is applied to what is pushed; None: it is added.
        """
        with self._calling():
            TableForm(key, rows, width, RowInit(init, scale), seed)
            spec = optimizer_spec(optimizer, numbers) if optimizer is not None else None
            row_optimizer(spec)
            self._begin({key: (Rows(rows, width, init, scale, seed, spec), None)})

    def set_optimizer(self, name: str | None, **numbers: Any) -> None:
        """From now on servers apply pushes with this optimizer of torch, for all keys but tables; None: they are added.

        All workers may call it with the same numbers. Another `lr` alone keeps the optimizer's state; anything else
        begins it anew.
        """
        with self._calling() as transfers:
            spec = optimizer_spec(name, numbers) if name is not None else None
            for number in transfers.slices:
                transfers.client.push(number, SetOptimizer(spec))
            transfers.settle()

    def push(self, key: str | Sequence[str], value: Any, *, rows: Any = None) -> None:
        """Push gradients, or values to add. Returns when they are queued; after `wait` they are applied.

        For a table, `rows` says which rows they are of; or the value is a sparse tensor.
        """
        with self._calling() as transfers:
            pairs = pair_up(key, value, "values")
            known = self._known([one for one, _ in pairs])
            dense: list[tuple[str, torch.Tensor]] = []
            sparse: list[tuple[str, torch.Tensor, torch.Tensor]] = []
            for one, given in pairs:  # all are checked before any is sent
                if isinstance(known[one].form, Rows) or rows is not None:
                    sparse.append((one, *row_gradients(one, require_table(one, known[one]), given, rows)))
                else:
                    form = require_dense(one, known[one])
                    dense.append((one, require_like(one, form, given, "the push of")))
            for one, gradient in dense:
                transfers.push(one, known[one], gradient)
            for one, numbers, gradient in sparse:
                transfers.push_rows(one, numbers, gradient)
            transfers.client.flush()

    def pull(self, key: str | Sequence[str], out: Any = None) -> Any:
        """The values of keys, with all that this client has pushed; into `out`, if given. One tensor, or a list."""
        with self._calling() as transfers:
            keys = [key] if isinstance(key, str) else list(key)
            outs = [None] * len(keys) if out is None else [one for _, one in pair_up(key, out, "outputs")]
            known = self._known(keys)
            found = [
                output_tensor(one, require_dense(one, known[one]), given) for one, given in zip(keys, outs, strict=True)
            ]
            transfers.pull(known, found)
            given = [fresh if out is None else out for fresh, out in zip(found, outs, strict=True)]
            return given[0] if isinstance(key, str) else given

    def row_sparse_pull(self, key: str, rows: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """The values of these rows of a table, in this order."""
        with self._calling() as transfers:
            form = require_table(key, self._known([key])[key])
            numbers = row_numbers(key, form, rows)
            found = output_tensor(key, Dense("float32", (len(numbers), form.width)), out)
            transfers.pull_rows(key, numbers, found)
            return found if out is None else out

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all workers call `barrier`. All pushes of this worker are acknowledged by then."""
        with self._calling() as transfers:
            seconds = transfers.timeout_s if timeout_s is None else timeout_s
            transfers.settle()
            transfers.change(Arrive(transfers.me, self.rank, self.workers))
            try:
                transfers.consult([], rank=self.rank, deadline=transfers.deadline("no barrier", seconds))
            except CallTimedOut:
                found = transfers.consult([])
                if self.rank not in found.arrived:
                    return  # the last worker has just come
                transfers.change(Withdraw(transfers.me, self.rank))
                missing = [str(one) for one in range(found.workers) if one not in found.arrived]
                raise CallTimedOut(
                    f"worker{'s' * (len(missing) > 1)} {', '.join(missing)} of {found.workers} did not reach the"
                    f" barrier in {seconds:g} s",
                    hint="check that they are alive; all must connect with the same number of workers",
                ) from None

    def wait(self) -> None:
        """Wait until every push is acknowledged: then it survives the death of a server."""
        with self._calling() as transfers:
            transfers.settle()

    def close(self) -> None:
        """Wait for the pushes (`wait`), and disconnect."""
        with self._lock:
            if self._over == "closed":
                return
            try:
                if not self._over:
                    self.wait()
            finally:
                self._over = "closed"
                self._transfers.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the caller gets the error of the block
            with contextlib.suppress(DistBeliefError):
                self.close()

    # --- internals ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _calling(self) -> Iterator[Transfers]:
        with self._lock, torch.no_grad():
            if self._over:
                raise DistBeliefError(f"this store is closed: {self._over}", hint="kv.connect(…) makes another")
            try:
                yield self._transfers
            except Aborted:
                self._over = _LOST
                raise DistBeliefError(
                    _LOST, hint="connect again and initialise the keys; two servers or more survive the death of one"
                ) from None

    def _begin(self, wanted: dict[str, tuple[Form, torch.Tensor | None]]) -> None:
        self._entries.update(initialise(self._transfers, wanted))

    def _known(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of these keys."""
        unknown = [key for key in keys if key not in self._entries]
        if unknown:
            entries = self._transfers.consult(unknown).entries
            missing = [key for key in unknown if key not in entries]
            if missing:
                raise DistBeliefError(
                    f"there is no key '{missing[0]}'",
                    hint="call init(key, value) on any worker first, then a barrier",
                )
            if not all(entry.sealed for entry in entries.values()):
                deadline = self._transfers.deadline(f"'{unknown[0]}' did not get its first value")
                entries = self._transfers.consult(unknown, sealed=True, deadline=deadline).entries
            self._entries.update(entries)
        return {key: self._entries[key] for key in keys}


# --- first values ----------------------------------------------------------------------------------------------------


def initialise(transfers: Transfers, wanted: dict[str, tuple[Form, torch.Tensor | None]]) -> dict[str, Entry]:
    """The entries of these keys, after all slices have their first values.

    The catalogue names an owner for each key and counts the attempts. Every other client waits, and one takes over if
    the owner does not finish in time. Slices refuse values of older attempts, so a first value is of one client alone.
    """
    attempts = dict.fromkeys(wanted, -1)
    while True:
        for key, (form, _) in wanted.items():
            transfers.client.push(CATALOGUE, DeclareKey(transfers.me, key, form, attempts[key]))
        found = transfers.consult(list(wanted))
        entries = found.entries
        for key, (form, _) in wanted.items():
            if key not in entries:
                left = f"{found.room / 2**30:.2f} GiB"
                raise DistBeliefError(
                    f"there is no room for '{key}', {describe(form)}: the servers have {left} left",
                    hint="use smaller values or a machine with more memory; each value is on two servers",
                )
            if entries[key].form != form:
                raise DistBeliefError(
                    f"'{key}' exists already, as {describe(entries[key].form)}; this call says {describe(form)}",
                    hint="use another key, or the same shape, type and options on all workers",
                )
        mine = [key for key, entry in entries.items() if entry.owner == transfers.me and not entry.sealed]
        _place(transfers, {key: (entries[key], wanted[key][1]) for key in mine})
        longest = max((entry.attempt for entry in entries.values()), default=0)
        try:
            deadline = transfers.deadline("no first value", TAKEN_OVER_AFTER_S * 2**longest)
            return transfers.consult(list(wanted), sealed=True, deadline=deadline).entries
        except CallTimedOut:
            attempts = {key: entry.attempt for key, entry in transfers.consult(list(wanted)).entries.items()}


def _place(transfers: Transfers, values: dict[str, tuple[Entry, torch.Tensor | None]]) -> None:
    if not values:
        return
    for key, (entry, value) in values.items():
        form = entry.form
        if isinstance(form, Dense):
            assert value is not None
            content, item_bytes = bytes_of(value), value.dtype.itemsize
            for one in entry.stretches:
                place = PlaceKey(key, entry.attempt, form, one.first, one.end)
                transfers.client.push(one.slice, place, content[one.first * item_bytes : one.end * item_bytes])
        else:
            for number in transfers.slices:
                transfers.client.push(number, PlaceKey(key, entry.attempt, form))
    transfers.settle()
    for key, (entry, _) in values.items():
        transfers.client.push(CATALOGUE, SealKey(transfers.me, key, entry.attempt))
