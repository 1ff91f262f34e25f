"""Every decoder against bytes of strangers: a message comes out, or the one error that is documented; and no more
memory is taken than the bytes themselves justify."""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from distbelief.control import messages
from distbelief.errors import DistBeliefError
from distbelief.kv import supervisormessages as words
from distbelief.kv.messages import MESSAGES as KV_MESSAGES
from distbelief.strategies.ps.protocol.frames import RUN_MESSAGES
from distbelief.strategies.sandblaster.messages import MESSAGES as SEARCH_MESSAGES
from distbelief.transport.gloo import rendezvousserver
from distbelief.transport.shm import memfd
from tests.fuzz.instances import instance
from tests.fuzz.mutation import HEADS, garbage, mutated

FRAMES = int(os.environ.get("FUZZ_FRAMES", "1500"))


def frames_of(decode: Callable[[list[zmq.Frame]], Any]) -> Callable[[bytes], Any]:
    return lambda data: decode([zmq.Frame(data), zmq.Frame(b"payload")])


DECODERS: dict[str, tuple[Callable[[bytes], Any], Any]] = {
    "events": (messages.decode_event, messages.Event),
    "commands": (messages.decode_command, messages.Command),
    "kv, heard": (words.decode_heard, words.Heard),
    "kv, told": (words.decode_told, words.Told),
    "rendezvous, requests": (rendezvousserver.decode_request, rendezvousserver.Request),
    "rendezvous, answers": (rendezvousserver.decode_answer, rendezvousserver.Answer),
}
for _name, _set in {"ps": RUN_MESSAGES, "sandblaster": SEARCH_MESSAGES, "kv": KV_MESSAGES}.items():
    DECODERS[f"{_name}, to clients"] = (frames_of(_set.unpack_for_client), list[_set.to_clients])
    DECODERS[f"{_name}, to servers"] = (frames_of(_set.unpack_for_server), list[_set.from_clients | _set.from_servers])
DOCUMENTED = (msgspec.MsgspecError, DistBeliefError)
every_decoder = pytest.mark.parametrize("name", DECODERS)


def tried(decode: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        decode(data)
    except DOCUMENTED:
        return False
    return True


@every_decoder
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=some.randoms(use_true_random=False))
def test_what_is_said_is_understood_and_what_is_almost_said_does_no_harm(name: str, random: Random) -> None:
    decode, kind = DECODERS[name]
    said = msgspec.msgpack.encode(instance(kind, random))
    tried(decode, said)
    tried(decode, mutated(said, [said], random))


@every_decoder
def test_frames_at_volume(name: str) -> None:
    decode, kind = DECODERS[name]
    random = Random(7)
    corpus = [msgspec.msgpack.encode(instance(kind, random)) for _ in range(200)]
    understood = sum(tried(decode, one) for one in corpus)
    assert understood > len(corpus) / 2  # else it is not these messages that are mutated
    for _ in range(FRAMES):
        tried(decode, mutated(random.choice(corpus), corpus, random))
        tried(decode, garbage(random))


@every_decoder
def test_a_number_that_a_stranger_gives_takes_no_memory(name: str) -> None:
    decode, kind = DECODERS[name]
    random = Random(3)
    said = [msgspec.msgpack.encode(instance(kind, random)) for _ in range(50)]
    attempts = [one[:place] + head for head in HEADS for one in said for place in (0, 1, 2, len(one) // 2, len(one))]
    for data in attempts:
        tried(decode, data)
    tracemalloc.start()
    try:
        for data in attempts:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            tried(decode, data)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 100 * len(data) + 200_000, data[:40]
    finally:
        tracemalloc.stop()


def test_what_comes_over_unix_sockets() -> None:
    """JSON headers, of whoever may open the socket: an engine must outlive them."""
    random = Random(5)
    corpus = [b'{"worker": 7, "secret": "00"}', b'{"name": "job", "size_bytes": -1}', b'{"drop": "x"}', b"[" * 60000]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for number in range(2000):
            data = corpus[number % 4] if number < 4 else mutated(random.choice(corpus), corpus, random)
            theirs.send(data or b"x")
            try:
                header, _ = memfd.receive_message(ours)
            except ValueError:
                continue
            assert isinstance(header, dict)
