"""sandblaster's servers and members in one process: the real members, slices and driver; messages as in world.py.

Members are threads, of which one runs at a time: whoever waits hands over to the world, which decides by its dice what
happens next. Memory is as on one host: what a member has pushed is overwritten as soon as it has gone on, and what a
slice shows may be overwritten while a member reads it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from distbelief.control.messages import ServerMap
from distbelief.coordinator.rules.servers import placement
from distbelief.coordinator.rules.servers.placement import Slice
from distbelief.job import Job
from distbelief.strategies.base import Seat, nothing_saved
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import VALUES_AT, Acknowledged, NotPrimary, Push
from distbelief.strategies.ps.server.node import ServerNode
from distbelief.strategies.ps.server.stores import SliceStore
from distbelief.strategies.ps.worker.exchange import DeviceServerExchange
from distbelief.strategies.sandblaster.member import SearchingMember
from distbelief.strategies.sandblaster.prepared import PreparedSandblaster
from distbelief.strategies.sandblaster.rules.lbfgs import Settings
from distbelief.strategies.sandblaster.slices import SliceMaker
from distbelief.strategies.sandblaster.strategy import Sandblaster
from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.device.accelerator import DeviceMemory
from distbelief.transport.shm.segment import Memory, Segment
from distbelief.verification.plain import make_model
from distbelief.verification.plainlbfgs import train_by_search
from tests.support.ps.world import MAPS, World

SAMPLES = 42
STRATEGY = Sandblaster(portion=4, history=3)
SETTINGS = Settings(history_size=STRATEGY.history, lr=STRATEGY.lr)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(60, 180), nn.Tanh(), nn.Linear(180, 4))
        self.register_buffer("scale", torch.tensor([0.5]))
        self.register_buffer("classes", torch.tensor(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs) * self.scale


class Kit:
    """The job, and what one process comes to."""

    def __init__(self, steps: int, model: Callable[[], nn.Module] = Net) -> None:
        dice = torch.Generator().manual_seed(3)
        inputs = torch.randn(SAMPLES, 60, generator=dice)
        targets = torch.randint(0, 4, (SAMPLES,), generator=dice)
        self.job = Job(
            model=model,
            loss=nn.functional.cross_entropy,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            data=(inputs, targets),
            global_batch=10,
            steps=steps,
            shuffle=False,
        )
        self.steps = steps
        self.schedule = STRATEGY.schedule_of(self.job, SAMPLES)
        self.shapes = self.prepared().slices()
        model = make_model(self.job)
        self.losses: list[float] = []
        self.weights: list[list[torch.Tensor]] = []
        for loss in train_by_search(self.job, model, STRATEGY):
            self.losses.append(loss)
            self.weights.append([parameter.detach().clone() for parameter in model.parameters()])

    def prepared(self) -> PreparedSandblaster:
        return PreparedSandblaster(self.job, self.schedule, torch.device("cpu"), SETTINGS)

    def fetch(self, step: int, first: int, end: int) -> tuple[Any, int]:
        _, low, _ = self.schedule.shard(step, first)
        _, _, high = self.schedule.shard(step, end - 1)
        inputs, targets = self.job.data
        return (inputs[low:high], targets[low:high]), high - low


class Turns:
    """Lets one thread run, until it waits."""

    def __init__(self) -> None:
        self.mine = threading.Semaphore(0)
        self.world = threading.Semaphore(0)

    def give(self) -> None:
        self.mine.release()
        self.world.acquire()

    def wait(self) -> None:
        self.world.release()
        self.mine.acquire()


class Client:
    """See `ServerClient`."""

    def __init__(self, number: int, post: Callable[[Any, Any, Framed], None]) -> None:
        self.number = number
        self.turns = Turns()
        self.ended = True
        self.known: ServerMap | None = None
        self._post = post
        self._sequences: dict[int, int] = {}
        self._tickets = 0
        self._unanswered: dict[Any, Framed] = {}
        self._given: dict[Any, Any] = {}
        self._replies: dict[int, Framed] = {}

    def restart(self) -> None:
        self._unanswered.clear()

    def slices(self, abort: Abort) -> int:
        while self.known is None:
            self.nap(0)
            abort.check()
        return len(self.known.primaries)

    def push(self, number: int, content: Any, payload: Any = None) -> None:
        sequence = self._sequences[number] = self._sequences.get(number, -1) + 1
        self._send((number, sequence), Framed(Push(self.number, sequence, number, content), payload))

    def flush(self) -> None:
        """All is on its way."""

    def settle(self, abort: Abort) -> None:
        self._wait(lambda: not any(isinstance(key, tuple) for key in self._unanswered), abort)

    def change(self, number: int, content: Any, abort: Abort) -> Any:
        self.push(number, content)
        key = number, self._sequences[number]
        self._wait(lambda: key not in self._unanswered, abort)
        return self._given.pop(key)

    def ask(self, questions: Iterable[Callable[[int], Any]], abort: Abort, each: Callable[[Framed], None]) -> None:
        tickets = []
        for make in questions:
            self._tickets += 1
            tickets.append(self._tickets)
            self._send(self._tickets, Framed(make(self._tickets)))
        self._wait(lambda: all(ticket in self._replies for ticket in tickets), abort)
        for ticket in tickets:
            each(self._replies.pop(ticket))

    def nap(self, seconds: float) -> None:
        self.turns.wait()

    def _wait(self, done: Callable[[], bool], abort: Abort) -> None:
        while True:
            abort.check()
            if done():
                return
            self.nap(0)

    def _send(self, key: Any, framed: Framed) -> None:
        self._unanswered[key] = framed
        if self.known is not None:
            to = self.known.primaries[framed.message.slice]
            self._post(("worker", self.number), ("server", to), framed)

    def send_again(self) -> None:
        for key, framed in list(self._unanswered.items()):
            self._send(key, framed)

    def hear(self, framed: Framed) -> None:
        match framed.message:
            case Acknowledged(slice=number, sequence=sequence, given=given):
                if self._unanswered.pop((number, sequence), None):
                    self._given[number, sequence] = given
            case NotPrimary():
                pass  # it is sent again
            case message:
                if self._unanswered.pop(message.ticket, None):
                    self._replies[message.ticket] = framed


@dataclass
class Group:
    """See `ServerExchange`."""

    world: SearchWorld
    generation: int
    rank: int
    size: int
    client: Client
    abort: Abort = field(default_factory=Abort)
    maps: bool = True
    apart: ClassVar[bool] = False
    grain_bytes: ClassVar[int] = 1
    _met: int = 0

    @property
    def segments(self) -> Group:
        return self

    def segment(self, name: str) -> Segment:
        return self.world.memory[name]

    def server_memory(self, name: str) -> Segment:
        return self.segment(name)

    def values(self, size_bytes: int) -> Memory:
        return self.memory("values", size_bytes)

    def room(self, index: int) -> Memory:
        return self.slot(index)[0]

    def bring(self, index: int) -> None: ...

    def memory(self, name: str, size_bytes: int) -> Segment:
        return self.world.memory.setdefault(f"{name} of {self.client.number}", Segment.private(size_bytes))

    def slot(self, index: int) -> tuple[Segment, str]:
        name = f"generation {self.generation}/{self.client.number}.{index}"
        return self.world.memory.setdefault(name, Segment.private(self.slot_bytes)), name

    @property
    def slot_bytes(self) -> int:
        return self.world.prepared[self.client.number].layout.size_bytes

    def gather(self, payload: bytes) -> list[bytes]:
        self._met += 1
        there = self.world.meetings.setdefault((self.generation, self._met), {})
        there[self.rank] = payload
        self.client._wait(lambda: len(there) == self.size, self.abort)
        return [there[rank] for rank in range(self.size)]

    def begin(self, step: int) -> None: ...

    def working_on(self, step: int, shard: int) -> None: ...

    def working(self, shard: int) -> None:
        """Others do something between any two portions."""
        self.client.nap(0)

    def forget_past(self) -> None: ...


@dataclass
class DeviceGroup(Group):
    """See `DeviceServerExchange`, whose own methods these are; the host's memory stands in for a device's."""

    apart: ClassVar[bool] = DeviceServerExchange.apart
    grain_bytes: ClassVar[int] = DeviceServerExchange.grain_bytes
    device: ClassVar[torch.device] = torch.device("cpu")
    kept: dict[str, Memory] = field(default_factory=dict)
    _rooms: dict[int, DeviceMemory] = field(default_factory=dict)
    values, room, bring, _pinned = (
        DeviceServerExchange.values, DeviceServerExchange.room, DeviceServerExchange.bring, DeviceServerExchange._pinned
    )  # type: ignore[assignment] # fmt: skip


class SearchWorld(World):
    kit: Kit  # type: ignore[assignment]

    def __init__(
        self, kit: Kit, seed: int, servers: int, workers: int, losing: float, group: type[Group] = Group
    ) -> None:
        """`group`: what members meet in; by it they compute on the host or apart."""
        self.kit = kit  # type: ignore[assignment]
        self.group = group
        self.chance = random.Random(seed)
        self.losing = losing
        self.slow, self.patience = "", 0.98
        self.links, self.memory, self.nodes = {}, {}, {}
        self.held: dict[tuple[int, int], SliceStore] = {}
        self.next_server, self.next_worker, self.generation, self.now = servers, 0, 0, 0.0
        self.clients: dict[int, Client] = {}  # type: ignore[assignment]
        self.prepared: dict[int, PreparedSandblaster] = {}
        self.meetings: dict[tuple[int, int], dict[int, bytes]] = {}
        self.aborts: list[Abort] = []
        self.threads: list[tuple[Client, threading.Thread]] = []
        self.failures: list[BaseException] = []
        self.steps_done = [0] * kit.steps
        self.portions_computed = 0
        self.told: list[str] = []
        sizes = [Slice(number, 100) for number in range(len(kit.shapes) + 1)]
        self.placed = placement.first(sizes, {server: f"host{server}" for server in range(servers)})
        for server in range(servers):
            self._start_server(server)
        self._tell_map()
        for _ in range(workers):
            self.hire()
        self.regroup()

    def _start_server(self, server: int) -> None:
        prepared, shapes = self.kit.prepared(), self.kit.shapes
        stores = SliceMaker(prepared, self.kit.schedule.shards, self.memory.__getitem__)

        def make(number: int, first: bool) -> tuple[SliceStore, str]:
            begin_from = nothing_saved if first else None
            store: SliceStore
            name = f"server {server}/slice {number}"
            if number == len(shapes):
                store, name = stores.search(begin_from), ""
            else:
                self.memory[name] = Segment.private(VALUES_AT + shapes[number].value_bytes)
                store = stores.slice(shapes[number], self.memory[name], begin_from)
            self.held[server, number] = store
            return store, name

        self.nodes[server] = ServerNode(server, make)

    # --- members -----------------------------------------------------------------------------------------------------

    def hire(self) -> None:
        worker, self.next_worker = self.next_worker, self.next_worker + 1
        self.clients[worker] = Client(worker, self.post)
        self.prepared[worker] = self.kit.prepared()
        self.post(MAPS, ("worker", worker), self._map())

    def kill_worker(self) -> None:
        victim = self.chance.choice(sorted(self.clients))
        self._end_generation()
        del self.clients[victim]
        self.hire()
        self.regroup()

    def _end_generation(self) -> None:
        """Everybody stops at the next thing that it waits for. What was sent may still be on its way."""
        for abort in self.aborts:
            abort.set("the members change")
        for client, thread in self.threads:
            while not client.ended:
                client.turns.give()
            thread.join()
        self.threads, self.aborts = [], []

    def regroup(self) -> None:
        self._end_generation()
        self.generation += 1
        workers = sorted(self.clients)
        self.chance.shuffle(workers)
        for rank, worker in enumerate(workers):
            client = self.clients[worker]
            client.turns, client.ended = Turns(), False
            group = self.group(self, self.generation, rank, len(workers), client)
            self.aborts.append(group.abort)
            thread = threading.Thread(target=self._live, args=[group, workers], daemon=True)
            self.threads.append((client, thread))
            thread.start()

    def _live(self, group: Group, workers: list[int]) -> None:
        turns = group.client.turns
        turns.mine.acquire()
        try:
            self._train(group, workers)
        except Aborted:
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            group.client.ended = True
            turns.world.release()

    def _train(self, group: Group, workers: list[int]) -> None:
        kit, prepared = self.kit, self.prepared[group.client.number]
        seat = Seat(group.rank, [(0, 1)] * group.size, kit.steps, group.generation, (), workers)
        computer: Any = prepared._computer

        def fetch(step: int, first: int, end: int) -> tuple[Any, int]:
            self.portions_computed += 1
            return kit.fetch(step, first, end)

        member = SearchingMember(
            computer, prepared._recipe, kit.schedule, seat, group, fetch, SETTINGS  # type: ignore[arg-type]
        )  # fmt: skip
        member.clock = lambda: self.now
        while (step := member.steps_applied()) < kit.steps:
            member.compute(step)
            result = member.commit(step)
            done = [one.loss for one in (*result.before, result)]
            assert member.steps_applied() == step + len(done)
            assert done == kit.losses[step : step + len(done)], f"step {step} gave {done}"
            for mine, expected in zip(computer.parameters, kit.weights[step], strict=True):
                assert torch.equal(mine, expected), f"step {step} has other bits than in one process"
            assert [one.loss for one in member.remembered(0)] == kit.losses[: step + len(done)]
            self.steps_done[step] += 1
            self.told += member.plan_lines() if group.rank == 0 else []

    def work(self) -> None:
        """One member goes on until it waits."""
        self.now += 0.001
        living = [client for client, _ in self.threads if not client.ended]
        if living:
            self.chance.choice(living).turns.give()
        if self.failures:
            raise self.failures[0]

    def remind(self) -> None:
        for server, node in self.nodes.items():
            self.perform(server, node.remind())
        for client in self.clients.values():
            client.send_again()

    def finish(self) -> None:
        """Nothing happens any more: all steps get done."""
        self.losing, self.slow = 0.0, ""
        for turn in range(100_000):
            self.work()
            for _ in range(3):
                self.deliver()
            if turn % 50 == 0:
                self.remind()
            if all(client.ended for client, _ in self.threads):
                break
        else:
            raise AssertionError("stuck")
        for _ in range(50):
            while any(self.links.values()):
                self.deliver()
            self.remind()
        self._check()

    def _check(self) -> None:
        """Primary and backup have the same of everything."""
        known = self.placed.map
        for number, holders in enumerate(zip(known.primaries, known.backups, strict=True)):
            states = [self.held[server, number].state() for server in holders if server != placement.NONE]
            for about, content in states[1:]:
                assert about == states[0][0]
                assert torch.equal(content, states[0][1])
