"""Which exchange is opened by members that each have the whole model: by the transport of the generation, by the device
that has the state, and by compression."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distbelief.compression.exchanges.choice import networked, networked_on
from distbelief.shards import Range
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.device.exchange import DeviceExchange
from distbelief.transport.device.nccl import NcclExchange
from distbelief.transport.exchange import Exchange, Geometry
from distbelief.transport.membership import Membership
from distbelief.transport.shm.exchange import SharedSlots


def open_exchange(
    membership: Membership, geometry: Callable[[Sequence[Range]], Geometry], device: torch.device, exact: bool
) -> Exchange:
    """`geometry`: the sizes of a generation with these ranges of shards; `device`: where the run's state lies."""
    if membership.transport == "shm" and membership.segments is not None:
        return membership.share(membership.segments, geometry)
    sizes = geometry(membership.ranges)
    if membership.transport == "nccl":
        on = device, exact, membership.memory, membership.device_memory
        return NcclExchange(membership.rendezvous(), membership.rank, sizes, membership.abort, *on)
    if membership.transport == "slots" and membership.segments is not None:
        past = membership.past(geometry)
        slots = SharedSlots(
            membership.segments, membership.name, membership.rank, sizes, membership.abort, past, membership.memory
        )
        if device.type == "cpu":
            return slots
        return DeviceExchange(slots, sizes, device, membership.device_memory, slots.where)
    networked_by = membership.rendezvous(), membership.rank, sizes, membership.abort, membership.memory
    if device.type == "cpu":
        return networked(*networked_by)
    return networked_on(Accelerator(device, membership.device_memory), *networked_by)
