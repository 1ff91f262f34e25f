"""How keys get their first values: one client gives them, all others wait, and one of them takes over if it dies.

The catalogue says whose it is, and counts the attempts; slices take no value of an older attempt after a newer one. So
what a key begins with is from one client alone.
"""

from __future__ import annotations

import torch

from distbelief.errors import DistBeliefError
from distbelief.kv.checks import described
from distbelief.kv.messages import CATALOGUE, DeclareKey, Dense, Entry, Form, PlaceKey, SealKey
from distbelief.kv.patience import TookTooLong
from distbelief.kv.traffic import Traffic, bytes_of

TAKEN_OVER_AFTER_S = 20.0
"""So long a client waits for another one's first value; twice as long for the next attempt."""


def begin(traffic: Traffic, wanted: dict[str, tuple[Form, torch.Tensor | None]]) -> dict[str, Entry]:
    """The entries of these keys, once all slices have their first values."""
    attempts = dict.fromkeys(wanted, -1)
    while True:
        for key, (form, _) in wanted.items():
            traffic.client.push(CATALOGUE, DeclareKey(traffic.me, key, form, attempts[key]))
        found = traffic.consult(list(wanted))
        entries = found.entries
        for key, (form, _) in wanted.items():
            if key not in entries:
                left = f"{found.room / 2**30:.2f} GiB"
                raise DistBeliefError(
                    f"there is no room for '{key}', {described(form)}: the servers have {left} left",
                    hint="use smaller values or a machine with more memory; each value is on two servers",
                )
            if entries[key].form != form:
                raise DistBeliefError(
                    f"'{key}' is there already, as {described(entries[key].form)}; now it was to be {described(form)}",
                    hint="use another key, or the same shape, type and options on all workers",
                )
        mine = [key for key, entry in entries.items() if entry.owner == traffic.me and not entry.sealed]
        _place(traffic, {key: (entries[key], wanted[key][1]) for key in mine})
        longest = max((entry.attempt for entry in entries.values()), default=0)
        try:
            patience = traffic.patience("no first value", TAKEN_OVER_AFTER_S * 2**longest)
            return traffic.consult(list(wanted), sealed=True, patience=patience).entries
        except TookTooLong:
            attempts = {key: entry.attempt for key, entry in traffic.consult(list(wanted)).entries.items()}


def _place(traffic: Traffic, values: dict[str, tuple[Entry, torch.Tensor | None]]) -> None:
    if not values:
        return
    for key, (entry, value) in values.items():
        form = entry.form
        if isinstance(form, Dense):
            assert value is not None
            content, item_bytes = bytes_of(value), value.dtype.itemsize
            for one in entry.stretches:
                place = PlaceKey(key, entry.attempt, form, one.first, one.end)
                traffic.client.push(one.slice, place, content[one.first * item_bytes : one.end * item_bytes])
        else:
            for number in traffic.slices:
                traffic.client.push(number, PlaceKey(key, entry.attempt, form))
    traffic.settle()
    for key, (entry, _) in values.items():
        traffic.client.push(CATALOGUE, SealKey(traffic.me, key, entry.attempt))
