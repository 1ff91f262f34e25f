"""The common base of all exchanges over torch.distributed that send compressed gradients.

Gradients of parameters are compressed on the way to the sum, and sums on the way back; buffers, rows and control
messages are never compressed. The unsent rest of a member's gradients is its residual, added in the member's next step.
Rank 0 measures whether compression pays, and tells all members in the row of a step whether the next step is
compressed. An uncompressed step also sends the residual. All members apply the same bytes.

Gradients and residuals may be on a device (`CodedOnDevice`). The bytes on the wire are the same as on the host, so
members of both kinds can exchange.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from distbelief.compression.residuals import Residuals
from distbelief.compression.switch import Message, Switch
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import Accelerator, DeviceMemory
from distbelief.transport.exchange import AllContributions, Compression, Contribution, Geometry, Source, StepPlan
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.shm.segment import Memory, Segment

_OFF, _ON = 1, 2  # rank 0's flag; the other members send 0


class CompressedExchange(TorchExchange, ABC):
    """See `Exchange`. Sums may depend on the members that take part, so exact strategies cannot use it."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        geometry: Geometry,
        abort: Abort,
        memory: dict[str, Segment] | None = None,
        further: int = 0,
        on: Accelerator | None = None,
    ) -> None:
        """`further`: elements that the compression method keeps beside the residuals. `on`: the device of the
        gradients; None: the host."""
        assert geometry.compression is not None
        self.compression: Compression = geometry.compression
        super().__init__(rendezvous, rank, geometry, abort, memory)
        elements = geometry.slot_bytes // 4
        self.accelerator = on
        self.slots: Sequence[Memory] = self._slots
        self.totals: Memory = self._sums
        """Memory of the sums. Compressed gradients are read from `slots`, and their sums are written here."""
        vectors: Memory | None = None
        if on:
            self.slots = [DeviceMemory(geometry.slot_bytes, on.device) for _ in self._slots]
            self.totals = DeviceMemory(geometry.slot_bytes, on.device)
            vectors = on.keep("residuals", 8 * (elements + further))
        self.residuals = Residuals(self._memory, elements, further, vectors)
        self.switch = Switch(self.compression.method)
        self.news: list[str] = []
        """Messages for people: that compression went on or off, and why."""
        self._packed = [tile for tile in self.tiles if tile in self.compression.tiles]
        self._unpacked = [tile for tile in self.tiles if tile not in self.compression.tiles]
        self._switched_on = True
        self._met = False
        self.packing = False
        """Whether this step is compressed."""
        self._sources: list[Source] = []
        """This member's sources."""
        self._senders: frozenset[int] = frozenset()
        self.releasing = False
        self._released: dict[int, torch.Tensor] = {}
        self._codec_s = self._wire_s = 0.0
        self._step_bytes = lru_cache(maxsize=16)(self._count_step_bytes)

    @property
    def traffic(self) -> tuple[int, int]:
        """(bytes that all members have sent, bytes that they would have sent uncompressed), since this member took
        part."""
        return self.residuals.traffic

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        found = self.residuals.begin(plan.step)
        if not self._met:
            self._met = True
            self._meet(found)
        self.packing = self._switched_on and self.size > 1
        self._plain = self._unpacked if self.packing else self.tiles
        self._sources = [source for source in plan.sources if source.rank == self.rank]
        self._senders = frozenset(source.rank for source in plan.sources)
        self._codec_s = self._wire_s = 0.0
        self.releasing = False
        if self.packing:
            self.residuals.mark_nonzero()
        elif self._sources:
            self.releasing = self.residuals.release()
        else:
            self.residuals.keep(slice(None))
        super().begin(plan)
        if self.packing:
            self._begin_packed()

    def publish(self, tile: int) -> None:
        if self.packing and tile in self.compression.tiles:
            self._publish_packed(tile)
        else:
            super().publish(tile)

    def _part(self, source: Source, tile: int) -> torch.Tensor:
        part = super()._part(source, tile)
        if self.accelerator or not self.releases(source, tile):  # on a device, `CodedOnDevice` adds the residual
            return part
        if tile not in self._released:
            self._released[tile] = torch.empty_like(part)
        return torch.add(part, self.residuals.before[self._span(tile)], out=self._released[tile])

    def releases(self, source: Source, tile: int) -> bool:
        """Whether this partial sum of this member includes the residual."""
        return self.releasing and source == self._sources[0] and tile in self.compression.tiles

    def share(self, contribution: Contribution, meanwhile: Callable[[], bool] = lambda: False) -> AllContributions:
        if not self.packing or self._whole_when_shared:
            # The sums that this member owns are not encoded yet; but no member can apply the step before they are.
            self.residuals.mark_complete()
        return super().share(contribution, meanwhile)

    def _control_number(self) -> int:
        if self.rank > 0:
            return 0
        return _ON if self.compression.always or self.switch.on else _OFF

    def _receive_control_number(self, number: int) -> None:
        self._switched_on = number == _ON

    def _collect(self) -> None:
        super()._collect()
        if self.packing:
            self._collect_packed()
        self._measure()

    def _spread(self) -> None:
        started = time.perf_counter()
        super()._spread()
        self._wire_s = time.perf_counter() - started

    def keep_untouched(self, untouched: np.ndarray) -> None:
        """The step was applied, but not to these entries of the layout: keep their residual as it was before the
        step."""
        if self.packing or self.releasing:
            for place in self.compression.places:
                if untouched[place.mark]:
                    self.residuals.keep(place.part)

    def _span(self, tile: int) -> slice:
        """The elements of a tile in the residual."""
        shape = self._geometry.tiles[tile]
        return slice(shape.offset_bytes // 4, shape.offset_bytes // 4 + shape.numel)

    # --- what it costs -----------------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        """Whether this member decides whether compression pays."""
        return self.rank == 0 and self.size > 1 and not self.compression.always

    def _measure(self) -> None:
        wire, plain = self._step_bytes(self._senders, self.packing)
        self.residuals.count(wire, plain)
        if not self._measures:
            return
        codec_s: float | None = self._codec_s if self.packing else None
        if self.switch.probe_due:
            codec_s = self._probe()
        encoded = self._step_bytes(self._senders, True)[0]
        was_on = self.switch.on
        self.switch = self.switch.after(
            Message(plain // self.size, self._timed_bytes(), self._wire_s, codec_s, encoded // self.size)
        )
        if self.switch.on != was_on:
            self.news.append(self.switch.why)

    def _count_step_bytes(self, senders: frozenset[int], packing: bool) -> tuple[int, int]:
        """(bytes, bytes uncompressed) that all members together send in a step, given the ranks that send partial
        sums."""
        plain = packed_plain = 0
        for tile in self.tiles:
            copies = len(senders - {self._owner[tile]}) + self.size - 1
            size_bytes = copies * self._geometry.tiles[tile].size_bytes
            plain += size_bytes
            packed_plain += size_bytes if tile in self.compression.tiles else 0
        return (plain - packed_plain + self._packed_bytes(senders) if packing else plain), plain

    # --- what each compression method implements ---------------------------------------------------------------------

    _whole_when_shared = True
    """Whether publishing all tiles completes the residual, apart from the sums that this member owns."""

    def _meet(self, found: bool) -> None:
        """Called before a generation's first step. `found`: whether this member has the residual of the state before
        that step."""

    def encode(self, tiles: range) -> None:
        """On a device: this member's part of these tiles is complete. Called on the stream that copies to the host,
        while other tiles are still computed; prepares the data that `publish` sends."""

    @abstractmethod
    def _begin_packed(self) -> None: ...

    @abstractmethod
    def _publish_packed(self, tile: int) -> None: ...

    @abstractmethod
    def _collect_packed(self) -> None:
        """Write the decoded sums to `totals`."""

    @abstractmethod
    def _packed_bytes(self, senders: frozenset[int]) -> int:
        """Bytes of compressed tiles that all members together send in a step."""

    @abstractmethod
    def _timed_bytes(self) -> int:
        """Bytes that crossed this member's link in `_wire_s`, in the busier direction."""

    @abstractmethod
    def _probe(self) -> float:
        """Seconds that compressing this uncompressed step would have taken."""
