"""A parameter server as a process: it loads the job as a worker does, then serves the slices that it is given.

One thread, one poll loop: workers and other servers come to one socket, the coordinator is reached over another, and
each other server over one more. What it does with a message is `servers/node.py`'s.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import signal
import socket as sockets
import sys
import time
import traceback
from typing import Any

import msgspec
import torch
import zmq

from distbelief.comm.messages import (
    EXIT_REPORTED,
    EndRun,
    Event,
    Introduce,
    Serve,
    ServerBeat,
    ServerFailed,
    ServerMap,
    ServerReady,
    SliceCopied,
    decode_command,
    encode,
)
from distbelief.comm.network import dial, host_of, protect
from distbelief.comm.segment import KeeperClient, Segment
from distbelief.comm.serverwords import VALUES_AT, Letter, pack
from distbelief.errors import DistBeliefError
from distbelief.servers.freeslice import FreeSlice
from distbelief.servers.ledgerslice import LedgerSlice, Terms
from distbelief.servers.node import Out, ServerNode
from distbelief.servers.runslice import RunSlice
from distbelief.servers.slicememory import SliceMemory
from distbelief.servers.stores import SliceStore
from distbelief.servers.wire import unpack
from distbelief.strategies.base import Saved
from distbelief.strategies.preparedsandblaster import PreparedSandblaster
from distbelief.strategies.preparedserved import PreparedServed
from distbelief.strategies.slicing import SliceShape
from distbelief.strategies.state import ReplicaState
from distbelief.worker.loading import load_for_server
from distbelief.worker.origin import newest_saved, weights_of
from distbelief.worker.spec import WorkerSpec
from distbelief.worker.vectorstores import VectorStores

BEAT_S = 0.2
REMIND_S = 0.5
LEDGER_BYTES = 4096  # about what it takes, for balancing
KEPT_SEGMENTS = 256
"""So many of the workers' slots stay mapped."""


def run_server(spec: WorkerSpec, keeper_socket: sockets.socket | None) -> int:
    """The life of a parameter server. Returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to everybody; the engine decides
    torch.set_num_threads(spec.threads)
    keeper = KeeperClient(keeper_socket) if keeper_socket else None
    with zmq.Context() as context:
        server = _Server(spec, context)
        try:
            contents = _Slices(spec, keeper)
            server.serve(contents)
        except BaseException as error:
            server.fail(error)
            return EXIT_REPORTED
        finally:
            server.close()
    return 0


class _Slices:
    """Makes the slices that this server is given."""

    def __init__(self, spec: WorkerSpec, keeper: KeeperClient | None) -> None:
        self._spec = spec
        # Where workers are on other hosts, nobody could map what lies in shared memory.
        self._keeper = keeper if spec.shares_memory else None
        self._job, self._schedule, self._steps, prepared = load_for_server(spec, keeper)
        assert isinstance(prepared, PreparedServed | PreparedSandblaster)
        self.facts = prepared.facts()
        self._shapes = prepared.slices()
        self._vectors: VectorStores | None = None
        if isinstance(prepared, PreparedSandblaster):
            self._vectors = VectorStores(prepared, self._schedule.shards, self._open)
            self.sizes = [*prepared.slice_sizes, LEDGER_BYTES]
        else:
            self.prepared: PreparedServed = prepared
            self._strategy = prepared.strategy
            self.sizes = [shape.size_bytes for shape in self._shapes]
            if not self._strategy.waits:
                self.sizes.append(LEDGER_BYTES)
        self._mapped: dict[str, Segment] = {}
        self._first: tuple[int, ReplicaState] | None = None
        self.life: int = 0
        self.sealed: int = 0

    def make(self, number: int, first: bool) -> tuple[SliceStore, str]:
        """`first`: with the values that the parameters have when this life begins."""
        if self._vectors:
            if number == len(self._shapes):
                return self._vectors.search(self._saved if first else None), ""
            values, name = self._segment(number)
            return self._vectors.slice(self._shapes[number], values, self._saved if first else None), name
        if number == len(self._shapes):
            return LedgerSlice(self._terms(self._first_state().steps_applied if first else 0)), ""
        shape = self._shapes[number]
        values, name = self._segment(number)
        memory = SliceMemory(shape, self.prepared.layout, self.prepared.recipe, self._job, values)
        store: RunSlice | FreeSlice
        if not self._strategy.waits:
            store = FreeSlice(memory, self._open)
        else:
            store = RunSlice(memory, self._job, self._schedule, self._open)
            store.clock = time.time
        if first:
            state = self._first_state()
            step = state.steps_applied
            if isinstance(store, FreeSlice):
                store.begin(self._contents(state, shape), self.prepared.integer_numbers(state.integers(step)))
            else:
                store.begin(self._contents(state, shape), step, state.integers(step))
                if number == 0:
                    store.note = state.note()
        return store, name

    def _segment(self, number: int) -> tuple[Segment, str]:
        """Memory for the values of a slice, and its name where workers can map it."""
        size_bytes = VALUES_AT + self._shapes[number].value_bytes
        name = f"server {self._spec.worker}/life {self.life}/slice {number}" if self._keeper else ""
        return self._keeper.segment(name, size_bytes) if self._keeper else Segment.private(size_bytes), name

    def _contents(self, state: ReplicaState, shape: SliceShape) -> torch.Tensor:
        content = Segment.private(shape.size_bytes)
        at = 0
        for tile, size in zip(shape.tiles, shape.state_bytes, strict=True):
            state.copy_tile(tile, content, at)
            at += self.prepared.layout.tiles[tile].size_bytes + size
        return content.tensor(torch.uint8, 0, shape.size_bytes)

    def _terms(self, first: int) -> Terms:
        strategy, saves = self._strategy, self._spec.saves
        return Terms(
            first, self._steps, strategy.n_push, strategy.staleness, strategy.warm_up, saves.every_steps if saves else 0
        )

    def began(self) -> None:
        """All slices are made: what they began with is not needed any more."""
        self._first = None
        if self._vectors:
            self._vectors.forget()

    def _first_state(self) -> ReplicaState:
        if self._first is None or self._first[0] != self.life:
            self._first = (self.life, self.prepared.first_state(self._saved))
        return self._first[1]

    def _saved(self, step: int = -1) -> Saved | None:
        origin = self._spec.origin
        if origin is None:
            return None
        saved = None
        if origin.checkpoints and (self.life > 1 or origin.resumed):
            # A run that was resumed may have sealed none since: then it begins again from the one that it found.
            at_most = None if origin.resumed and not self.sealed else self.sealed
            saved, skipped = newest_saved(origin.checkpoints, at_most=at_most)
            for bad, why in skipped:
                print(f"the checkpoint of step {bad} cannot be used: {why}", flush=True)
        return saved or (weights_of(origin.weights) if origin.weights else None)

    def _open(self, name: str) -> Segment:
        """A worker's slot, by its name."""
        if self._keeper is None:
            raise DistBeliefError(f"'{name}' is memory of another host")
        if name not in self._mapped:
            while len(self._mapped) >= KEPT_SEGMENTS:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[name] = self._keeper.segment(name)
        return self._mapped[name]


class _Server:
    def __init__(self, spec: WorkerSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._spec = spec
        self._secret = bytes.fromhex(spec.secret)
        self._context = context
        self._coordinator = context.socket(zmq.DEALER)
        self._coordinator.setsockopt(zmq.LINGER, 2000)
        dial(self._coordinator, spec.address, self._secret)
        self._inbox = context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._inbox.setsockopt(option, 0)
        host = host_of(spec.address)
        listen = f"tcp://{_own_address(host)}:*"
        protect(self._inbox, listen, self._secret)
        if ":" in host:
            self._inbox.setsockopt(zmq.IPV6, 1)
        self._inbox.bind(listen)
        address = self._inbox.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        self._address = address.rstrip(b"\0").decode()
        self._peers: dict[int, zmq.Socket[bytes]] = {}
        self._map: ServerMap | None = None
        self._epoch = 0
        self._ended = False
        self._terminated = False
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

    def serve(self, slices: _Slices) -> None:
        node = ServerNode(self._spec.worker, slices.make)
        ready = ServerReady(self._spec.worker, self._spec.host, os.getpid(), self._address, slices.sizes, slices.facts)
        self._tell(ready)
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        poller.register(self._coordinator, zmq.POLLIN)
        next_beat = next_reminder = time.monotonic()
        while not self._ended:
            there = dict(poller.poll(int(BEAT_S * 1000 / 2)))
            if self._coordinator in there:
                for command in self._commands():
                    if isinstance(command, Introduce):
                        self._tell(ready)
                    elif isinstance(command, Serve):
                        slices.life, slices.sealed = command.map.life, command.map.sealed
                        self._map = command.map
                        self._hang_up()
                        self._send(node.learn(command.map))
                        slices.began()
            if self._inbox in there:
                self._receive(node)
            now = time.monotonic()
            if now >= next_reminder:
                next_reminder = now + REMIND_S
                self._send(node.remind())
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._tell(ServerBeat(self._spec.worker, self._epoch, node.version))

    def _commands(self) -> list[Any]:
        found: list[Any] = []
        while True:
            try:
                frames = self._coordinator.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            with contextlib.suppress(msgspec.MsgspecError):
                command = decode_command(frames[-1])
                if command.epoch < self._epoch:
                    continue  # an older coordinator that does not know it was replaced
                self._epoch = command.epoch
                self._ended |= isinstance(command, EndRun)
                found.append(command)

    def _receive(self, node: ServerNode) -> None:
        """Everything that waits, then one round of answers: they go out in as few messages as can be."""
        out = Out()
        for _ in range(1000):
            try:
                identity, secret, *frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            except ValueError:
                continue
            if not frames or not hmac.compare_digest(secret.bytes, self._secret):
                continue
            try:
                letters = unpack(frames)
            except (msgspec.MsgspecError, DistBeliefError):
                continue  # not a message of ours
            for letter in letters:
                out.add(node.receive(letter, identity.bytes))
        self._send(out)

    def _send(self, out: Out) -> None:
        for identity, letters in _by_addressee(out.clients).items():
            with contextlib.suppress(zmq.ZMQError):  # it is gone
                self._inbox.send_multipart([identity, *pack(self._secret, letters)[1:]], zmq.NOBLOCK)
        for server, letters in _by_addressee(out.servers).items():
            socket = self._peer(server)
            if socket is not None:
                socket.send_multipart(pack(self._secret, letters), zmq.NOBLOCK, copy=False)
        for number, recruit, version in out.copied:
            self._tell(SliceCopied(self._spec.worker, number, recruit, version))

    def _peer(self, server: int) -> zmq.Socket[bytes] | None:
        address = self._map.addresses.get(server) if self._map else None
        if address is None:
            return None
        if server not in self._peers:
            socket = self._context.socket(zmq.DEALER)
            for option in (zmq.SNDHWM, zmq.LINGER):
                socket.setsockopt(option, 0)
            dial(socket, address, self._secret)
            self._peers[server] = socket
        return self._peers[server]

    def _hang_up(self) -> None:
        """On servers that are not there any more."""
        assert self._map is not None
        for server in [one for one in self._peers if one not in self._map.addresses]:
            self._peers.pop(server).close(linger=0)

    def _tell(self, event: Event) -> None:
        with contextlib.suppress(zmq.Again):
            self._coordinator.send_multipart([self._secret, encode(event)], zmq.NOBLOCK)

    def fail(self, error: BaseException) -> None:
        traceback.print_exc()
        text = "".join(traceback.format_exception(error))
        known = isinstance(error, DistBeliefError)
        message = error.message if isinstance(error, DistBeliefError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, DistBeliefError) else "see its log in the logs folder of the run"
        self._tell(ServerFailed(self._spec.worker, self._spec.host, message, hint, "" if known else text))

    def close(self) -> None:
        self._inbox.close(linger=0)
        for socket in self._peers.values():
            socket.close(linger=0)
        self._coordinator.close()
        sys.stdout.flush()


def _by_addressee(letters: list[tuple[Any, Letter]]) -> dict[Any, list[Letter]]:
    found: dict[Any, list[Letter]] = {}
    for addressee, letter in letters:
        found.setdefault(addressee, []).append(letter)
    return found


def _own_address(coordinator: str) -> str:
    """The address of this machine from which the coordinator is reached: where others reach us too."""
    family = sockets.AF_INET6 if ":" in coordinator else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
        probe.connect((coordinator, 9))  # sends nothing: it only asks the kernel for the route
        mine = str(probe.getsockname()[0])
    return f"[{mine}]" if ":" in mine else mine
