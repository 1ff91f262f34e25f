"""The store as its users see it: what they give is checked here, and sent by `traffic.py`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from distbelief.errors import DistBeliefError
from distbelief.kv import beginning, checks
from distbelief.kv.keyoptimizer import optimizer_spec, row_optimizer
from distbelief.kv.messages import Arrive, Dense, Entry, Form, Rows, SetOptimizer, Withdraw
from distbelief.kv.patience import TookTooLong
from distbelief.kv.traffic import Traffic
from distbelief.strategies.ps.tables.rowinit import RowInit, TableForm
from distbelief.transport.abort import Aborted

_LOST = "the values of all keys are lost: the servers that had them died before others had a copy"


class Store:
    """A client of a key-value service; made by `kv.connect`. Any thread may use it; calls come one after the other."""

    def __init__(self, traffic: Traffic, rank: int, workers: int) -> None:
        self.rank = rank
        self.workers = workers
        self._traffic = traffic
        self._entries: dict[str, Entry] = {}
        self._lock = threading.RLock()
        self._over = ""

    def init(self, key: str | Sequence[str], value: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Give keys their first values. Where several workers do, the first one's value counts; all return when every
        server has it."""
        with self._calling():
            given = checks.listed(key, value, "values")
            self._begin({one: (checks.form_of(one, first), first) for one, first in given})

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
        with self._calling() as traffic:
            spec = optimizer_spec(name, numbers) if name is not None else None
            for number in traffic.slices:
                traffic.client.push(number, SetOptimizer(spec))
            traffic.settle()

    def push(self, key: str | Sequence[str], value: Any, *, rows: Any = None) -> None:
        """Push gradients, or whatever is to be added. Returns when they are on their way; after `wait` they count.

        For a table, `rows` says which rows they are of; or the value is a sparse tensor.
        """
        with self._calling() as traffic:
            pairs = checks.listed(key, value, "values")
            known = self._known([one for one, _ in pairs])
            dense: list[tuple[str, torch.Tensor]] = []
            sparse: list[tuple[str, torch.Tensor, torch.Tensor]] = []
            for one, given in pairs:  # all are checked before any is sent
                if isinstance(known[one].form, Rows) or rows is not None:
                    sparse.append((one, *checks.row_gradients(one, checks.table(one, known[one]), given, rows)))
                else:
                    form = checks.dense(one, known[one])
                    dense.append((one, checks.fitting(one, form, given, "the push of")))
            for one, gradient in dense:
                traffic.push(one, known[one], gradient)
            for one, numbers, gradient in sparse:
                traffic.push_rows(one, numbers, gradient)
            traffic.client.flush()

    def pull(self, key: str | Sequence[str], out: Any = None) -> Any:
        """The values of keys, with all that this client has pushed; into `out`, if given. One tensor, or a list."""
        with self._calling() as traffic:
            keys = [key] if isinstance(key, str) else list(key)
            outs = [None] * len(keys) if out is None else [one for _, one in checks.listed(key, out, "outputs")]
            known = self._known(keys)
            found = [
                checks.output(one, checks.dense(one, known[one]), given) for one, given in zip(keys, outs, strict=True)
            ]
            traffic.pull(known, found)
            given = [fresh if out is None else out for fresh, out in zip(found, outs, strict=True)]
            return given[0] if isinstance(key, str) else given

    def row_sparse_pull(self, key: str, rows: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """The values of these rows of a table, in this order."""
        with self._calling() as traffic:
            form = checks.table(key, self._known([key])[key])
            numbers = checks.row_numbers(key, form, rows)
            found = checks.output(key, Dense("float32", (len(numbers), form.width)), out)
            traffic.pull_rows(key, numbers, found)
            return found if out is None else out

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all workers have come to a barrier. What this one has pushed before it counts then."""
        with self._calling() as traffic:
            seconds = traffic.timeout_s if timeout_s is None else timeout_s
            traffic.settle()
            traffic.change(Arrive(traffic.me, self.rank, self.workers))
            try:
                traffic.consult([], rank=self.rank, patience=traffic.patience("no barrier", seconds))
            except TookTooLong:
                found = traffic.consult([])
                if self.rank not in found.arrived:
                    return  # the last one came just now
                traffic.change(Withdraw(traffic.me, self.rank))
                missing = [str(one) for one in range(found.workers) if one not in found.arrived]
                raise TookTooLong(
                    f"worker{'s' * (len(missing) > 1)} {', '.join(missing)} of {found.workers} did not come to the"
                    f" barrier in {seconds:g} s",
                    hint="see whether they are alive; all have to be connected with the same number of workers",
                ) from None

    def wait(self) -> None:
        """Return when everything that was pushed counts, whoever dies."""
        with self._calling() as traffic:
            traffic.settle()

    def close(self) -> None:
        """Wait for what was pushed, and leave."""
        with self._lock:
            if self._over == "closed":
                return
            try:
                if not self._over:
                    self.wait()
            finally:
                self._over = "closed"
                self._traffic.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # what is wrong is on its way to the caller already
            with contextlib.suppress(DistBeliefError):
                self.close()

    # --- how ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _calling(self) -> Iterator[Traffic]:
        with self._lock, torch.no_grad():
            if self._over:
                raise DistBeliefError(f"this store is over: {self._over}", hint="kv.connect(…) makes another")
            try:
                yield self._traffic
            except Aborted:
                self._over = _LOST
                raise DistBeliefError(
                    _LOST, hint="connect again and initialise the keys; two servers or more survive the death of one"
                ) from None

    def _begin(self, wanted: dict[str, tuple[Form, torch.Tensor | None]]) -> None:
        self._entries.update(beginning.begin(self._traffic, wanted))

    def _known(self, keys: Sequence[str]) -> dict[str, Entry]:
        """The entries of these keys."""
        unknown = [key for key in keys if key not in self._entries]
        if unknown:
            entries = self._traffic.consult(unknown).entries
            missing = [key for key in unknown if key not in entries]
            if missing:
                raise DistBeliefError(
                    f"there is no key '{missing[0]}'",
                    hint="init(key, value) comes first, by any worker; then a barrier",
                )
            if not all(entry.sealed for entry in entries.values()):
                patience = self._traffic.patience(f"'{unknown[0]}' did not get its first value")
                entries = self._traffic.consult(unknown, sealed=True, patience=patience).entries
            self._entries.update(entries)
        return {key: self._entries[key] for key in keys}
