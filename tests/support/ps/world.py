"""Servers, workers and a maker of maps in one thread. Messages are late, lost and doubled; servers and workers die.

Memory is as on one host: a worker's partial sums lie where servers read them when they come to it, and are overwritten
as soon as the worker has gone on; its parameters lie where the servers update them. Every worker compares what it has
fetched with what one process has at that step, whenever it computes with it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from distbelief.control.messages import ServerMap
from distbelief.coordinator.rules.servers import placement
from distbelief.coordinator.rules.servers.placement import Slice
from distbelief.coordinator.rules.servers.roles import Decision, Placement
from distbelief.shards import Range
from distbelief.strategies.flatmodel.rules.stepwork import plan_step, plan_takeover
from distbelief.strategies.ps.protocol.messages import VALUES_AT, ApplyStep, Inspect, MeasureStep, PullValues, values_at
from distbelief.strategies.ps.rules.gathering import shards_on_all_slices
from distbelief.strategies.ps.server.node import Outgoing, ServerNode
from distbelief.strategies.ps.server.syncslice import SynchronousSlice
from distbelief.transport.exchange import PublishedSum, Source
from distbelief.transport.shm.segment import Segment
from tests.support.ps.client import Client
from tests.support.ps.parts import SHARDS, Kit

MAPS = "maps"
Actor = tuple[str, int] | str


class World:
    def __init__(self, kit: Kit, seed: int, servers: int, workers: int, steps: int, losing: float) -> None:
        self.kit = kit
        self.chance = random.Random(seed)
        self.losing = losing
        self.steps = steps
        self.slow: Actor = ""
        """Messages to and from it come very late."""
        self.patience = 0.98
        self.expected = kit.history(steps)
        self.links: dict[tuple[Actor, Actor], deque[Any]] = {}
        self.memory: dict[str, Segment] = {}
        self.nodes: dict[int, ServerNode] = {}
        self.stores: dict[str, SynchronousSlice] = {}
        self.next_server = servers
        self.next_worker = 0
        self.generation = 0
        self.clients: dict[int, Client] = {}
        self.running: dict[int, Iterator[None]] = {}
        self.done: set[int] = set()
        self.found: tuple[int, list[Range]] | None = None
        self.met = 0
        sizes = [Slice(shape.number, shape.size_bytes) for shape in kit.shapes]
        self.placed = placement.first(sizes, {server: f"host{server}" for server in range(servers)})
        for server in range(servers):
            self._start_server(server)
        self._tell_map()
        for _ in range(workers):
            self.hire()
        self.regroup()

    # --- messages ----------------------------------------------------------------------------------------------------

    def post(self, source: Actor, to: Actor, message: Any) -> None:
        for _ in range(2 if self.chance.random() < self.losing else 1):
            if self.chance.random() >= self.losing or source == MAPS:
                self.links.setdefault((source, to), deque()).append(message)

    def deliver(self) -> None:
        ready = sorted((link for link, queue in self.links.items() if queue), key=repr)
        if self.chance.random() < self.patience:
            ready = [link for link in ready if self.slow not in link]
        if not ready:
            return
        self.hand_over(*self.chance.choice(ready))

    def hand_over(self, source: Actor, to: Actor) -> None:
        """The first message of a link."""
        message = self.links[source, to].popleft()
        if to == MAPS:
            self.decided(placement.copied(self.placed, message[0], source[1], *message[1:]))  # type: ignore[arg-type]
            return
        kind, number = to
        if kind == "worker" and number in self.clients:
            if isinstance(message, ServerMap):
                self.clients[number].known = message
            else:
                self.clients[number].hear(message)
        elif kind == "server" and number in self.nodes:
            node = self.nodes[number]
            self.perform(number, node.learn(message) if isinstance(message, ServerMap) else node.receive(
                message, str(source[1]).encode()))  # fmt: skip

    def perform(self, server: int, out: Outgoing) -> None:
        for client, framed in out.clients:
            self.post(("server", server), ("worker", int(client)), framed)
        for other, framed in out.servers:
            self.post(("server", server), ("server", other), framed)
        for report in out.copied:
            self.post(("server", server), MAPS, report)

    # --- servers -----------------------------------------------------------------------------------------------------

    def _start_server(self, server: int) -> None:
        def make(number: int, first: bool) -> tuple[SynchronousSlice, str]:
            name = f"{server}/{number}"
            size_bytes = VALUES_AT + self.kit.shapes[number].value_bytes
            values = self.memory.setdefault(name, Segment.private(size_bytes))  # workers may still map it
            self.stores[name] = self.kit.store(number, first, self.memory.__getitem__, values)
            return self.stores[name], name

        self.nodes[server] = ServerNode(server, make)

    def _map(self) -> ServerMap:
        known = self.placed.map
        addresses = dict.fromkeys(self.nodes, "")
        return ServerMap(
            known.version, 1, list(known.primaries), list(known.backups), list(self.placed.recruits), addresses
        )

    def _tell_map(self) -> None:
        for server in self.nodes:
            self.post(MAPS, ("server", server), self._map())
        for worker in self.clients:
            self.post(MAPS, ("worker", worker), self._map())

    def decided(self, decision: tuple[Placement, Decision]) -> None:
        before, (self.placed, what) = self.placed.map.version, decision
        assert not what.lost
        for server in self.nodes.keys() - self.placed.hosts.keys():  # it has handed everything over
            self._gone(server)
        if self.placed.map.version != before:
            self._tell_map()

    def kill_server(self) -> None:
        """Any that can die without loss."""
        known = self.placed.map
        needed = {p for p, b in zip(known.primaries, known.backups, strict=True) if b == placement.NONE}
        victims = sorted(self.nodes.keys() - needed)
        if not victims:
            return
        victim = self.chance.choice(victims)
        self._gone(victim)
        self.decided(placement.without(self.placed, {victim}))

    def _gone(self, server: int) -> None:
        del self.nodes[server]
        for link in [link for link in self.links if ("server", server) in link]:
            del self.links[link]

    def slow_down(self) -> None:
        self.slow = ("server", self.chance.choice(sorted(self.nodes)))

    def join_server(self) -> None:
        server, self.next_server = self.next_server, self.next_server + 1
        self._start_server(server)
        self.decided(placement.with_server(self.placed, server, f"host{server}"))

    def leave_server(self) -> None:
        """It goes when everything that it has is handed over."""
        staying = sorted(self.nodes.keys() - set(self.placed.leaving))
        if len(staying) > 1:
            self.decided(placement.leave(self.placed, self.chance.choice(staying)))

    def remind(self) -> None:
        for server, node in self.nodes.items():
            self.perform(server, node.remind())
        for client in self.clients.values():
            for key in list(client.waiting):
                client.send(key)

    # --- workers -----------------------------------------------------------------------------------------------------

    def hire(self) -> None:
        worker, self.next_worker = self.next_worker, self.next_worker + 1
        self.clients[worker] = Client(worker, len(self.kit.shapes), self.post)
        self.post(MAPS, ("worker", worker), self._map())

    def kill_worker(self) -> None:
        victim = self.chance.choice(sorted(self.clients))
        del self.clients[victim]
        self.hire()
        self.regroup()

    def regroup(self) -> None:
        """All members begin a new generation. What the old one has sent may still be on its way."""
        self.generation += 1
        self.found, self.met, self.done = None, 0, set()
        workers = sorted(self.clients)
        self.chance.shuffle(workers)
        size = len(workers)
        ranges = [(rank * SHARDS // size, (rank + 1) * SHARDS // size) for rank in range(size)]
        self.running = {worker: self._work(worker, rank, ranges) for rank, worker in enumerate(workers)}

    def work(self) -> None:
        """One worker does something, or looks in vain whether it can."""
        worker = self.chance.choice(sorted(self.running))
        if next(self.running[worker], self) is self:
            self.done.add(worker)

    def _work(self, worker: int, rank: int, ranges: list[Range]) -> Iterator[None]:
        client = self.clients[worker]
        client.restart()
        looked = yield from client.ask(Inspect)
        if rank == 0:
            version = min(one.version for one in looked)
            self.found = (version, shards_on_all_slices(looked, SHARDS))
        while self.found is None:
            yield
        step, nodes = self.found
        held = [PublishedSum(node, Source(0, 0)) for node in nodes]
        takeover = None
        if step < self.steps:
            takeover = plan_takeover(SHARDS, self.kit.schedule.occupied(step), held, len(ranges), rank)
        shown: list[str] = []
        if takeover is None or takeover.recomputed:
            shown = yield from self._bring(client, step)
        self.met += 1
        while self.met < len(ranges):
            yield
        while step < self.steps:
            work = takeover or plan_step(SHARDS, self.kit.schedule.occupied(step), ranges, rank)
            takeover = None
            for node, slot in work.partials.results.items():
                self._push(client, self._seen(shown, step), step, node, slot)
                yield
            if rank == 0:
                measured = yield from client.ask(partial(_measure, step))
                factor = self.kit.factor([one.squares for one in measured])
                for number in range(len(self.kit.shapes)):
                    client.push(number, ApplyStep(step, factor))
            step += 1
            shown = yield from self._bring(client, step)

    def _push(self, client: Client, values: bytes, step: int, node: Range, slot: int) -> None:
        """Into the memory in which the sums of the step before were."""
        name = f"generation {self.generation}/{client.number}.{slot}"
        segment = self.memory.setdefault(name, Segment.private(self.kit.layout.size_bytes))
        total = self.kit.total(values, step, node)
        segment.tensor(torch.float32, 0, len(total)).copy_(torch.from_numpy(total))
        for number in range(len(self.kit.shapes)):
            client.push(number, self.kit.node(step, node, name))

    def _seen(self, shown: list[str], version: int) -> bytes:
        """The parameters of a worker, in the memory of the servers that it was answered by."""
        assert shown, "a shard is computed without values"
        whole = bytearray(self.kit.layout.size_bytes)
        for name, shape in zip(shown, self.kit.shapes, strict=True):
            view = self.memory[name].view(values_at(shape.first_byte), shape.value_bytes)
            whole[shape.first_byte : shape.end_byte] = bytes(view)
        assert bytes(whole) == self.expected[version], f"step {version} has other bits than in one process"
        return bytes(whole)

    def _bring(self, client: Client, version: int) -> Generator[None, None, list[str]]:
        replies = yield from client.ask(partial(_fetch, version))
        for message, shape in zip(replies, self.kit.shapes, strict=True):
            assert message.version == version, f"slice {shape.number} is at {message.version}, not {version}"
        shown = [message.segment for message in replies]
        self._seen(shown, version)
        if version and replies[0].rows:
            rows = np.frombuffer(replies[0].rows).reshape(-1, 4)
            assert rows.tobytes() == self.kit.rows(version - 1, (0, SHARDS))
        assert replies[0].integers == (b"after %d" % (version - 1) if version else b"")
        return shown

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Nothing happens any more: all steps are done, and all who have a slice have the same."""
        self.losing, self.slow = 0.0, ""
        for _ in range(300):
            if len(self.done) == len(self.running):
                break
            for worker, one in self.running.items():
                if worker not in self.done and next(one, self) is self:
                    self.done.add(worker)
            for _ in range(400):
                self.deliver()
            self.remind()
        else:
            raise AssertionError(f"stuck: {[client.waiting for client in self.clients.values()]}")
        for _ in range(50):
            while any(self.links.values()):
                self.deliver()
            self.remind()
            if set(self.placed.recruits) <= {placement.NONE}:
                break
        while any(self.links.values()):
            self.deliver()
        self._check()

    def _check(self) -> None:
        known = self.placed.map
        staying = self.nodes.keys() - set(self.placed.leaving)
        assert len(staying) < 2 or placement.NONE not in known.backups
        for number, holders in enumerate(zip(known.primaries, known.backups, strict=True)):
            shape = self.kit.shapes[number]
            for server in set(holders) - {placement.NONE}:
                store = self.stores[f"{server}/{number}"]
                assert store.version == self.steps
                assert bytes(store.memory.value_view()) == self.expected[-1][shape.first_byte : shape.end_byte]
            states = {bytes(self.stores[f"{s}/{number}"].memory.contents().numpy()) for s in set(holders) - {-1}}
            assert len(states) == 1  # the optimizer's state too


def _measure(step: int, ticket: int, number: int) -> MeasureStep:
    return MeasureStep(ticket, number, step)


def _fetch(version: int, ticket: int, number: int) -> PullValues:
    return PullValues(ticket, number, version)
