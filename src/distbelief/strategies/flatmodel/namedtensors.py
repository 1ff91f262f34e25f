"""The state of a replica as named tensors: what a checkpoint holds, which member saves which part, loading.

    model/NAME           a parameter (frozen ones too) or a buffer; a tied one under its first name
    optimizer/KEY/NAME   the optimizer's state of a parameter
    begun/NAME           whether the optimizer has state for the parameter yet
    compression/…        residuals: the unsent part of members' gradients (dataparallel/compressed.py)

The names contain neither tiles nor members, so any layout and any number of members can load a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from distbelief.checkpoint.faults import CheckpointMismatch
from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.checkpoint.sources import MODEL
from distbelief.checkpoint.tensorforms import Forms, differences, form, forms, misfit
from distbelief.strategies.base import Saved
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes, state_places
from distbelief.strategies.tables.embedding import densified, tables_in_rows
from distbelief.transport.shm.segment import Segment

OWED = "compression/"
RESIDUAL = f"{OWED}residual/"
"""The rank of the residual's member and the parameter's name follow: `compression/residual/0/weight`."""


@dataclass(frozen=True)
class TilePlace:
    """A stretch of a named tensor in the bytes of a tile: its values, then its optimizer state."""

    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    count: int
    at_bytes: int


def tile_places(layout: Layout, recipe: Recipe, tile: int) -> Iterator[TilePlace]:
    for piece in layout.pieces[tile]:
        entry = layout.entries[piece.entry]
        at = piece.tile_first * entry.dtype.itemsize
        yield TilePlace(f"{MODEL}{entry.name}", entry.dtype, tuple(entry.shape), piece.first, piece.numel, at)
    if tile >= layout.parameter_tiles:
        return
    after = layout.tiles[tile].size_bytes
    for place in state_places(recipe, layout, tile):
        piece, entry = place.piece, layout.entries[place.piece.entry]
        for field, at in place.fields:
            name = f"optimizer/{field.key}/{entry.name}"
            if recipe.elementwise and field.shape:
                yield TilePlace(name, field.dtype, tuple(entry.shape), piece.first, piece.numel, after + at)
            elif piece.first == 0:  # a scalar is the same for all pieces of a parameter
                yield TilePlace(name, field.dtype, field.shape, 0, field.numel, after + at)
        if piece.first == 0:
            yield TilePlace(f"begun/{entry.name}", torch.uint8, (), 0, 1, after + place.flag_at)


class TilePortion:
    """A portion of a state: some tiles, one after the other, and tensors outside of the tiles. See `Portion`."""

    def __init__(self, layout: Layout, recipe: Recipe, tiles: Iterable[int], outside: Sequence[PartEntry]) -> None:
        self._layout = layout
        self._recipe = recipe
        self._outside = outside
        self.starts: dict[int, int] = {}
        """Tile -> its first byte."""
        at = 0
        for tile in tiles:
            self.starts[tile] = at
            at += layout.tiles[tile].size_bytes
            at += state_bytes(recipe, layout, tile) if tile < layout.parameter_tiles else 0
        self.size_bytes = at

    def entries(self) -> list[PartEntry]:
        found = [PartEntry(p.tensor, dtype_name(p.dtype), p.shape, p.first, p.count) for _, p in self._all()]
        return [*found, *self._outside]

    def slices(self, copy: Segment, outside: Mapping[str, torch.Tensor]) -> list[Slice]:
        found = [Slice(p.tensor, copy.tensor(p.dtype, at, p.count), p.shape, p.first) for at, p in self._all()]
        return [*found, *(Slice.whole(entry.tensor, outside[entry.tensor]) for entry in self._outside)]

    def _all(self) -> Iterator[tuple[int, TilePlace]]:
        for tile, start in self.starts.items():
            for place in tile_places(self._layout, self._recipe, tile):
                yield start + place.at_bytes, place


def outside_of_tiles(model: torch.nn.Module, layout: Layout, integers: bytes) -> dict[str, torch.Tensor]:
    """The model's tensors without bytes in a tile: frozen parameters, integer buffers, empty tensors."""
    found = {f"{MODEL}{name}": p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    found |= {f"{MODEL}{e.name}": torch.empty(e.shape, dtype=e.dtype) for e in layout.entries if not e.numel}
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point():
            size = buffer.numel() * buffer.element_size()
            part, integers = bytearray(integers[:size]), integers[size:]
            value = torch.frombuffer(part, dtype=buffer.dtype) if size else torch.empty(0, dtype=buffer.dtype)
            found[f"{MODEL}{name}"] = value.view(buffer.shape)
    return found


def whole_entries(tensors: Mapping[str, torch.Tensor]) -> list[PartEntry]:
    return [PartEntry(name, dtype_name(t.dtype), tuple(t.shape), 0, t.numel()) for name, t in tensors.items()]


def tied(model: torch.nn.Module) -> dict[str, str]:
    """Other name of a tensor -> its first name.

    >>> one = torch.nn.Linear(2, 2)
    >>> tied(torch.nn.Sequential(one, one))
    {'1.weight': '0.weight', '1.bias': '0.bias'}
    """
    first: dict[int, str] = {}
    found = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        known = first.setdefault(id(tensor), name)
        if known != name:
            found[name] = known
    return found


def transient(model: torch.nn.Module) -> list[str]:
    """Buffers that are not persistent, which `load_state_dict` does not expect."""
    kept = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name not in kept]


# --- back again ------------------------------------------------------------------------------------------------------


def put_back(saved: Saved, state: ReplicaState, computer: ShardComputer, recipe: Recipe) -> None:
    """Load a saved state into this replica. Nothing is written unless all tensors fit."""
    layout, model = computer.layout, computer.model
    tensors = _fitting(saved, computer, recipe)
    for tile in range(len(layout.tiles)):
        for piece in layout.pieces[tile]:
            value = tensors[f"{MODEL}{layout.entries[piece.entry].name}"].reshape(-1)
            part = slice(piece.tile_first, piece.tile_first + piece.numel)
            state.values[tile][part] = value[piece.first : piece.first + piece.numel]
        if tile < layout.parameter_tiles and not _is_weights_alone(saved):
            put_optimizer_back(tensors, state.optimizer[tile], layout, recipe, tile)
    integers = (tensors[f"{MODEL}{n}"] for n, b in model.named_buffers() if not b.is_floating_point())
    state.write_integers(saved.step, b"".join(i.cpu().contiguous().numpy().tobytes() for i in integers))
    set_frozen(model, tensors)
    for applied in saved.history:
        state.remember(applied)
    if saved.note:
        state.write_note(saved.step, saved.note)
    state.begin_at(saved.step)  # last: a partly written state is no state


def put_optimizer_back(
    tensors: Mapping[str, torch.Tensor], memory: torch.Tensor, layout: Layout, recipe: Recipe, tile: int
) -> None:
    """Write the named tensors to their places in the bytes of a tile's optimizer state."""
    for place in state_places(recipe, layout, tile):
        piece, name = place.piece, layout.entries[place.piece.entry].name
        for field, at in place.fields:
            value = tensors[f"optimizer/{field.key}/{name}"].reshape(-1)
            if recipe.elementwise and field.shape:
                value = value[piece.first : piece.first + piece.numel]
            memory[at : at + field.numel * field.dtype.itemsize].view(field.dtype).copy_(value)
        memory[place.flag_at] = tensors[f"begun/{name}"]


def frozen(model: torch.nn.Module) -> list[str]:
    return [f"{MODEL}{name}" for name, p in model.named_parameters() if not p.requires_grad]


def set_frozen(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters that are not trained. Nothing is written unless all tensors fit."""
    own = {f"{MODEL}{name}": p for name, p in model.named_parameters() if not p.requires_grad}
    require_fit(forms({name: tensor for name, tensor in tensors.items() if name in own}), forms(own))
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def _is_weights_alone(saved: Saved) -> bool:
    return all(name.startswith(MODEL) for name in saved.tensors)


def _fitting(saved: Saved, computer: ShardComputer, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The tensors of this model's state; every name and shape is checked."""
    model = computer.model
    others = {f"{MODEL}{name}" for name in tied(model)}
    given = {name: tensor for name, tensor in saved.tensors.items() if name not in others}
    if _is_weights_alone(saved):
        given = densified(model, given, MODEL)
    elif served := tables_in_rows(model, given, MODEL):
        raise CheckpointMismatch(
            f"the table '{served[0]}' is in rows there, as parameter servers keep it, and a parameter here",
            hint="go on with --strategy ps, or begin a run with its weights alone (`distbelief train --from`)",
        )
    own = outside_of_tiles(model, computer.layout, computer.integer_bytes())
    own |= {f"{MODEL}{name}": t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    if _is_weights_alone(saved):
        for name in transient(model):  # a weights file lacks them: they keep the job's values
            given.setdefault(f"{MODEL}{name}", own[f"{MODEL}{name}"])
    wanted = dict(forms(own))
    if not _is_weights_alone(saved):
        every = range(len(computer.layout.tiles))
        portion = TilePortion(computer.layout, recipe, every, [])
        wanted |= {e.tensor: form(e.dtype, e.shape) for e in portion.entries()}
    require_fit(forms(given), wanted)
    return given


def require_fit(given: Forms, wanted: Forms) -> None:
    """Raise an error that names the differences. Residuals are not compared: they do not belong to the model."""
    given = {name: of for name, of in given.items() if not name.startswith(OWED)}
    if lines := differences(given, "the saved state", wanted, "the job"):
        raise misfit(
            "the saved state is of another model or optimizer",
            lines,
            hint="load it with the job that it was saved from; nothing was loaded",
            kind=CheckpointMismatch,
        )
