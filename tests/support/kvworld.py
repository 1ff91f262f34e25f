"""A key-value service without sockets: messages are late, lost and doubled, servers die, and clients push and pull.

Servers are the real nodes and stores, maps are decided by the real `supervision.py`; clients are as simple as can be.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from distbelief.control.messages import ServerMap
from distbelief.coordinator.rules.servers import placement
from distbelief.kv.catalogue import Catalogue
from distbelief.kv.keyslice import KeySlice
from distbelief.kv.messages import CATALOGUE, AddToKey, Dense, PlaceKey, PullKey
from distbelief.kv.rules import supervision
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Acknowledged, NotPrimary, Push
from distbelief.strategies.ps.server.node import Outgoing, ServerNode
from distbelief.transport.shm.segment import Segment

SIZE = 4


class Space:
    def make(self, size_bytes: int) -> tuple[torch.Tensor, str]:
        return torch.empty(size_bytes, dtype=torch.uint8), ""

    def release(self, name: str) -> None:
        raise AssertionError(name)

    def open(self, name: str) -> Segment:
        raise AssertionError(name)


class Client:
    """Sends what is not answered again and again, to whoever is primary."""

    def __init__(self, number: int, world: World) -> None:
        self.number = number
        self.world = world
        self.known: ServerMap | None = None
        self.sequences: dict[int, int] = {}
        self.waiting: dict[tuple[int, int], Framed] = {}
        self.replies: dict[int, Framed] = {}

    def push(self, number: int, content: Any, payload: Any) -> None:
        sequence = self.sequences.get(number, -1) + 1
        self.sequences[number] = sequence
        self.waiting[number, sequence] = Framed(Push(self.number, sequence, number, content), payload)

    def ask(self, ticket: int, question: Any) -> None:
        self.waiting[-1, ticket] = Framed(question)

    def send(self) -> None:
        if self.known is None:
            return
        for letter in self.waiting.values():
            primary = self.known.primaries[letter.message.slice]
            if primary >= 0:
                self.world.post(f"client {self.number}", f"server {primary}", letter)

    def hear(self, letter: Framed) -> None:
        match letter.message:
            case Acknowledged(slice=number, sequence=sequence):
                self.waiting.pop((number, sequence), None)
            case NotPrimary():
                pass
            case reply:
                if self.waiting.pop((-1, reply.ticket), None):
                    self.replies[reply.ticket] = letter


class World:
    def __init__(self, seed: int, servers: int, clients: int, losing: float) -> None:
        self.chance = random.Random(seed)
        self.losing = losing
        self.links: dict[tuple[str, str], deque[Any]] = {}
        self.nodes: dict[int, ServerNode] = {}
        self.stores: dict[tuple[int, int], KeySlice | Catalogue] = {}
        self.clients = [Client(number, self) for number in range(clients)]
        self.fleet, outputs = supervision.begun(servers, 0.0)
        self._do(outputs)
        self.deliver_all()

    def post(self, source: str, to: str, message: Any) -> None:
        for _ in range(2 if self.chance.random() < self.losing else 1):
            if source == "maps" or to == "maps" or self.chance.random() >= self.losing:
                self.links.setdefault((source, to), deque()).append(message)

    def deliver(self) -> bool:
        ready = sorted(link for link, queue in self.links.items() if queue)
        if not ready:
            return False
        source, to = self.chance.choice(ready)
        message = self.links[source, to].popleft()
        kind, _, number = to.partition(" ")
        if kind == "maps":
            self._do_result(message())
        elif kind == "client":
            client = self.clients[int(number)]
            if isinstance(message, ServerMap):
                client.known = message
            else:
                client.hear(message)
        elif int(number) in self.nodes:
            node = self.nodes[int(number)]
            given = node.learn(message) if isinstance(message, ServerMap) else node.receive(message, source.encode())
            self._perform(int(number), given)
        return True

    def deliver_all(self) -> None:
        while self.deliver():
            pass

    def _perform(self, server: int, out: Outgoing) -> None:
        for client, letter in out.clients:
            self.post(f"server {server}", client.decode(), letter)
        for other, letter in out.servers:
            self.post(f"server {server}", f"server {other}", letter)
        for number, recruit, known in out.copied:
            self._tell_maps(
                server, lambda n=number, r=recruit, k=known: supervision.copied(self.fleet, n, server, r, k)
            )

    def _tell_maps(self, server: int, event: Callable[[], supervision.Result]) -> None:
        self.post(f"server {server}", "maps", event)

    def _do_result(self, result: supervision.Result) -> None:
        self.fleet, outputs = result
        self._do(outputs)

    def _do(self, outputs: list[supervision.Output]) -> None:
        for one in outputs:
            match one:
                case supervision.Start(server=server):
                    self._start(server)
                case supervision.TellAll():
                    known = self.fleet.map()
                    for to in [*(f"server {n}" for n in self.nodes), *(f"client {c.number}" for c in self.clients)]:
                        self.post("maps", to, known)
                case supervision.Fail():
                    raise AssertionError(one.message)

    def _start(self, server: int) -> None:
        def make(number: int, first: bool) -> tuple[KeySlice | Catalogue, str]:
            store = Catalogue(16, 1 << 30) if number == CATALOGUE else KeySlice(Space())
            self.stores[server, number] = store
            return store, ""

        self.nodes[server] = ServerNode(server, make)
        self._tell_maps(server, lambda: supervision.ready(self.fleet, server, "host", server, f"{server}", 0.0))

    def kill(self) -> None:
        """Any server that can die without loss."""
        placed = self.fleet.placement
        if placed is None:
            return
        needed = {p for p, b in zip(placed.map.primaries, placed.map.backups, strict=True) if b < 0}
        victims = sorted(self.nodes.keys() & placed.hosts.keys() - needed)
        if not victims:
            return
        victim = self.chance.choice(victims)
        del self.nodes[victim]
        for link in [link for link in self.links if f"server {victim}" in link]:
            del self.links[link]
        self._do_result(supervision.exited(self.fleet, victim, -9, 0.0))

    def remind(self) -> None:
        for server, node in self.nodes.items():
            self._perform(server, node.remind())
        for client in self.clients:
            client.send()

    def settle(self) -> None:
        """Nothing is lost any more, until all is answered and every slice has its backup."""
        self.losing = 0.0
        for _ in range(200):
            self.remind()
            self.deliver_all()
            copied = set(self.fleet.placement.recruits) <= {placement.NONE}  # type: ignore[union-attr]
            if copied and not any(client.waiting for client in self.clients):
                return
        raise AssertionError(f"stuck: {[client.waiting for client in self.clients]}")


def placed(world: World, key: str, slices: list[int]) -> None:
    content = torch.zeros(SIZE).view(torch.uint8).numpy()
    for number in slices:
        world.clients[0].push(number, PlaceKey(key, 0, Dense("float32", (SIZE,)), 0, SIZE), content)
    world.settle()


def pushed(client: Client, key: str, slices: list[int]) -> None:
    for number in slices:
        client.push(number, AddToKey(key), torch.ones(SIZE).view(torch.uint8).numpy())


def pulled(client: Client, ticket: int, key: str, number: int) -> None:
    after = client.sequences.get(number, -1) + 1
    client.ask(ticket, PullKey(ticket, number, client.number, after, key))
