"""The world of world.py with tables instead of dense parameters: rows are pulled, and pushed with each shard."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import numpy as np

from distbelief.coordinator.rules.servers import placement
from distbelief.shards import Range
from distbelief.strategies.flatmodel.rules.stepwork import plan_step, plan_takeover
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import RUN, Acknowledged, ApplyStep, Inspect, MeasureStep, Push
from distbelief.strategies.ps.rules.gathering import shards_on_all_slices
from distbelief.strategies.ps.server.node import ServerNode
from distbelief.strategies.ps.tables.messages import CountRows, PullRows
from distbelief.strategies.ps.tables.rowbuckets import part_of
from distbelief.strategies.ps.tables.slices import AsynchronousTableSlice, SynchronousTableSlice
from distbelief.strategies.tables.rowgradients import RowGradients
from distbelief.transport.exchange import PublishedSum, Source
from tests.support.ps.client import Client
from tests.support.ps.tableparts import PARTS, SHARDS, Kit
from tests.support.ps.world import MAPS, World


class TableClient(Client):
    """It keeps what came in frames, and names updates by their number."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.payloads: dict[int, Any] = {}

    def update(self, number: int, content: Any, payload: Any) -> None:
        key = (number, RUN, content.update)
        self.waiting[key] = Framed(Push(self.number, content.update, number, content), payload)
        self.send(key)

    def hear(self, framed: Framed) -> None:
        message = framed.message
        if isinstance(message, Acknowledged) and message.source == RUN:
            self.waiting.pop((message.slice, RUN, message.sequence), None)
            return
        if framed.payload is not None and message.ticket in self.waiting:
            self.payloads[message.ticket] = bytes(framed.payload)
        super().hear(framed)


class TableWorld(World):
    kit: Kit  # type: ignore[assignment]
    clients: dict[int, TableClient]  # type: ignore[assignment]
    stores: dict[str, SynchronousTableSlice]  # type: ignore[assignment]

    def _start_server(self, server: int) -> None:
        def make(number: int, first: bool) -> tuple[SynchronousTableSlice, str]:
            self.stores[f"{server}/{number}"] = self.kit.store()
            return self.stores[f"{server}/{number}"], ""

        self.nodes[server] = ServerNode(server, make)

    def hire(self) -> None:
        worker, self.next_worker = self.next_worker, self.next_worker + 1
        self.clients[worker] = TableClient(worker, PARTS, self.post)
        self.post(MAPS, ("worker", worker), self._map())

    def _work(self, worker: int, rank: int, ranges: list[Range]) -> Iterator[None]:
        client = self.clients[worker]
        client.restart()
        looked = yield from client.ask(Inspect)
        if rank == 0:
            self.found = (
                min(one.version for one in looked),
                shards_on_all_slices(looked, SHARDS),
            )
        while self.found is None:
            yield
        step, nodes = self.found
        takeover = None
        if step < self.steps:
            held = [PublishedSum(node, Source(0, 0)) for node in nodes]
            takeover = plan_takeover(SHARDS, self.kit.schedule.occupied(step), held, len(ranges), rank)
        self.met += 1
        while self.met < len(ranges):
            yield
        while step < self.steps:
            work = takeover or plan_step(SHARDS, self.kit.schedule.occupied(step), ranges, rank)
            takeover = None
            found: dict[int, list[RowGradients]] = {}
            for unit in work.partials.work:
                values = yield from self._pull(client, step, unit.shard)
                found[unit.shard] = self.kit.found_out(step, unit.shard, values)
            if found:
                for number, change in enumerate(self.kit.changes(step, list(found), list(found.values()))):
                    client.push(number, change.content, change.payload)
                    yield
            if rank == 0:
                measured = yield from client.ask(partial(_measure, step))
                factor = self.kit.factor([one.squares for one in measured])
                for number in range(PARTS):
                    client.push(number, ApplyStep(step, factor))
            step += 1
            counted = yield from client.ask(partial(_count, step))
            assert {one.version for one in counted} == {step}

    def _pull(self, client: TableClient, step: int, shard: int) -> Generator[None, None, list[np.ndarray]]:
        wanted = self.kit.wanted(step, shard)
        values = []
        for table, rows in enumerate(wanted):
            parts = part_of(rows, PARTS)
            mine = [np.flatnonzero(parts == part) for part in range(PARTS)]
            replies = yield from client.ask(partial(_pull, step, table, [rows[places].tobytes() for places in mine]))
            value = np.zeros((len(rows), self.kit.specs[table].form.width), np.float32)
            for reply, places in zip(replies, mine, strict=True):
                assert reply.version == step, f"part {reply.slice} is at {reply.version}, not {step}"
                value[places] = np.frombuffer(client.payloads.pop(reply.ticket), np.float32).reshape(-1, value.shape[1])
            values.append(value)
        expected = self.kit.pulled(self.kit.stages(self.steps)[step], wanted)
        assert all(np.array_equal(a, b) for a, b in zip(values, expected, strict=True)), "other rows"
        return values

    def _check(self) -> None:
        for number, store in self._holders():
            assert store.version == self.steps
            assert bytes(store.contents().numpy()) == self.expected[-1][number]

    def _holders(self) -> Iterator[tuple[int, Any]]:
        known = self.placed.map
        staying = self.nodes.keys() - set(self.placed.leaving)
        assert len(staying) < 2 or placement.NONE not in known.backups
        for number, holders in enumerate(zip(known.primaries, known.backups, strict=True)):
            for server in set(holders) - {placement.NONE}:
                yield number, self.stores[f"{server}/{number}"]


class FreeTableWorld(TableWorld):
    """Updates that wait for nobody. What a dead worker had not finished is done again by others, all of it."""

    stores: dict[str, AsynchronousTableSlice]  # type: ignore[assignment]

    def __init__(self, *arguments: Any) -> None:
        self.finished: set[int] = set()
        super().__init__(*arguments)

    def _start_server(self, server: int) -> None:
        def make(number: int, first: bool) -> tuple[AsynchronousTableSlice, str]:
            self.stores[f"{server}/{number}"] = self.kit.free()
            return self.stores[f"{server}/{number}"], ""

        self.nodes[server] = ServerNode(server, make)

    def _work(self, worker: int, rank: int, ranges: list[Range]) -> Iterator[None]:
        client = self.clients[worker]
        client.restart()
        for update in range(self.steps):
            if update % len(ranges) != rank or update in self.finished:
                continue
            found = [
                RowGradients(rows, np.ones((len(rows), width), np.float32))
                for rows, width in zip(self.kit.wanted(update, 0), (3, 2), strict=True)
            ]
            for number, change in enumerate(self.kit.update(update, update, found)):
                client.update(number, change.content, change.payload)
                yield
            while client.waiting:
                yield
            self.finished.add(update)

    def _check(self) -> None:
        expected: list[dict[int, float]] = [{}, {}]
        for update in range(self.steps):
            for table, rows in enumerate(self.kit.wanted(update, 0)):
                for row in rows.tolist():
                    expected[table][row] = expected[table].get(row, 0.0) - 1
        counted: dict[int, list[dict[int, float]]] = {}
        for number, store in self._holders():
            found = [
                dict(zip(state["rows"].tolist(), state["values"][:, 0].tolist(), strict=True))
                for state in (table.state() for table in store.tables)
            ]
            assert counted.setdefault(number, found) == found  # primary and backup
        for table in range(2):
            assert {row: value for found in counted.values() for row, value in found[table].items()} == expected[table]


def _measure(step: int, ticket: int, number: int) -> MeasureStep:
    return MeasureStep(ticket, number, step)


def _count(step: int, ticket: int, number: int) -> CountRows:
    return CountRows(ticket, number, step)


def _pull(step: int, table: int, rows: list[bytes], ticket: int, number: int) -> PullRows:
    return PullRows(ticket, number, step, table, rows[number])
