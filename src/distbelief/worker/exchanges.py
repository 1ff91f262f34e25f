"""Which exchange the members of a generation meet in: by its transport, and by what this worker computes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from distbelief.compression.exchanges.choice import networked, networked_on
from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.worker.exchange import DeviceServerExchange, ServerExchange
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.device.exchange import DeviceExchange
from distbelief.transport.device.nccl import NcclExchange
from distbelief.transport.exchange import Geometry, Group
from distbelief.transport.gloo.group import TorchGroup
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.controlblock import EarlierGeneration
from distbelief.transport.shm.exchange import SharedExchange, SharedSlots
from distbelief.worker.loading import Loaded
from distbelief.worker.place import Place
from distbelief.worker.rules.control import TrainGeneration


def exchange_of(place: Place, loaded: Loaded, action: TrainGeneration, abort: Abort) -> Group:
    """Of that generation, with everybody in it."""
    geometry = loaded.prepared.geometry(action.ranges)
    if place.client is None:
        return _members(place, loaded, action, abort, geometry)
    assert geometry is not None
    segments = place.segments if action.transport == "shm" else None
    meet: Callable[[], TorchGroup] | SharedExchange = partial(_torch_group, place, action, abort)
    if segments is not None:
        shared = _members(place, loaded, action, abort, geometry)
        assert isinstance(shared, SharedExchange)
        meet = shared
    given = action.rank, len(action.members), meet, place.client, abort, geometry.slot_bytes, segments, place.own_memory
    if loaded.device.type == "cpu":
        return ServerExchange(*given)
    return DeviceServerExchange(*given, device=loaded.device, kept=place.device_memory)


def _members(
    place: Place, loaded: Loaded, action: TrainGeneration, abort: Abort, geometry: Geometry | None
) -> SharedExchange | TorchGroup | DeviceExchange:
    name, device = _group_name(action.generation), loaded.state_device
    if geometry is None:
        return _torch_group(place, action, abort)
    if action.transport == "shm" and place.segments is not None:
        return SharedExchange(place.segments, name, action.rank, geometry, abort, _past(loaded, action))
    if action.transport == "nccl":
        on = device, loaded.strategy.exact, place.own_memory, place.device_memory
        return NcclExchange(_meeting(place, action), action.rank, geometry, abort, *on)
    if action.transport == "slots" and place.segments is not None:
        past = _past(loaded, action)
        slots = SharedSlots(place.segments, name, action.rank, geometry, abort, past, place.own_memory)
        if device.type == "cpu":
            return slots
        return DeviceExchange(slots, geometry, device, place.device_memory, slots.where)
    given = _meeting(place, action), action.rank, geometry, abort, place.own_memory
    if device.type == "cpu":
        return networked(*given)
    return networked_on(Accelerator(device, place.device_memory), *given)


def _past(loaded: Loaded, action: TrainGeneration) -> list[EarlierGeneration]:
    """What earlier generations may have left in shared memory."""
    return [
        EarlierGeneration(_group_name(one.generation), before)
        for one in action.past
        if (before := loaded.prepared.geometry([member.shards for member in one.members]))
    ]


def _torch_group(place: Place, action: TrainGeneration, abort: Abort) -> TorchGroup:
    return TorchGroup(_meeting(place, action), action.rank, len(action.members), abort)


def _meeting(place: Place, action: TrainGeneration) -> Rendezvous:
    if place.spec.store is None:
        raise DistBeliefError("the members are on several hosts, but this worker was told of no rendezvous store")
    return Rendezvous(*place.spec.store, _group_name(action.generation), credential=place.spec.credential)


def _group_name(generation: int) -> str:
    return f"generation {generation}"
