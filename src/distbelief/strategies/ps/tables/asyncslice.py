"""A part of the tables when workers wait for nobody: each update of rows is applied as it comes."""

from __future__ import annotations

import msgspec

from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.frames import Letter
from distbelief.strategies.ps.protocol.messages import Question, Read
from distbelief.strategies.ps.server.stores import Change, Snapshot, State
from distbelief.strategies.ps.tables.messages import Count, Numbers, Pull, RowGradient
from distbelief.strategies.ps.tables.rowmessages import together
from distbelief.strategies.ps.tables.tablepart import TablePart, as_tensor


class FreeTables(TablePart):
    def apply(self, change: Change) -> None:
        match change.content:
            case RowGradient(step=step, counts=counts):
                (found,) = together([[count] for count in counts], self._widths, change.payload)
                for table, one in zip(self.tables, found, strict=True):
                    table.push(as_tensor(one.rows), as_tensor(one.gradients), self._factor(step))
                self.version += 1

    def state(self) -> State:
        return Snapshot(self.version, msgspec.msgpack.encode(self.counts)), self.contents()

    def load(self, state: State) -> None:
        snapshot, content = state
        self._load(msgspec.msgpack.decode(snapshot.about, type=list[int]), content)
        self.version = snapshot.version

    def reply(self, question: Question, segment: str, everywhere: bool, caught_up: bool) -> Letter | None:
        match question:
            case Pull():
                return self._values(question)
            case Count():
                return self._counted(question) if caught_up else None
            case Numbers():
                return self._numbers(question) if caught_up else None
            case Read():
                return self._read(question) if caught_up else None
            case _:
                raise DistBeliefError(f"a part of an asynchronous run's tables is not asked {type(question).__name__}")
