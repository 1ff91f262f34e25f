"""A key-value service under attack while a client uses it."""

from __future__ import annotations

import contextlib
import json
import socket as sockets
from pathlib import Path
from random import Random

import psutil
import torch

from distbelief import kv
from distbelief.control.credentials import KeyAuthority
from tests.fuzz.attacks import Attacker
from tests.fuzz.mutation import mutated


def besiege(frames: int, seed: int = 1) -> tuple[dict[str, int], dict[int, float]]:
    """Throw so many frames at all doors of a service, and look whether it counts right. Returns what was sent, and by
    how many MB each process has grown."""
    with kv.serve(servers=2, shared_memory=False) as file, kv.connect(file) as store:
        known = json.loads(Path(file).read_text())
        enemy = Attacker(KeyAuthority(bytes.fromhex(known["secret"])).run, Random(seed))
        try:
            return _besieged(store, known["address"], Path(file).parent, enemy, frames)
        finally:
            enemy.close()


def _besieged(
    store: kv.Store, supervisor: str, folder: Path, enemy: Attacker, frames: int
) -> tuple[dict[str, int], dict[int, float]]:
    store.init("w", torch.zeros(1000))
    processes = psutil.Process().children(recursive=True)
    listening = [c.laddr for one in processes for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    doors = sorted({(one.ip, one.port) for one in listening})
    assert len(doors) == 3, "the process that watches, and two servers"
    sent: dict[str, int] = {}
    before = {one.pid: one.memory_info().rss for one in processes}
    each = frames // 3
    for round_ in range(1, 4):
        for host, port in doors:
            address = f"tcp://{host}:{port}"
            key = enemy.authority.coordinator_key if address == supervisor else b""
            attacks = {
                "raw bytes": enemy.raw(host, port, each // 12),
                "strangers": enemy.strangers(address, each // 12),
                "unsigned": enemy.unsigned(address, key, each // 12),
                "members": enemy.member(address, key, each // 12, servers=address != supervisor),
            }
            for name, count in attacks.items():
                sent[name] = sent.get(name, 0) + count
        sent["segments"] = sent.get("segments", 0) + _segments(folder, enemy.random, min(each // 50, 200))
        store.push("w", torch.ones(1000))
        assert store.pull("w").tolist() == [float(round_)] * 1000
    assert {one.pid for one in psutil.Process().children(recursive=True)} == before.keys(), "no process has died"
    return sent, {one.pid: (one.memory_info().rss - before[one.pid]) / 2**20 for one in processes}


def _segments(folder: Path, random: Random, count: int) -> int:
    """The Unix socket over which memory is handed out, as its owner could misuse it."""
    said = [b'{"drop": "x"}', b'{"name": "nothing", "size_bytes": -1}', b'{"name": 1}', b"[" * 60000, b"[]"]
    for _ in range(count):
        with contextlib.suppress(OSError), sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as door:
            door.connect(str(folder / "segments.sock"))
            door.send(
                mutated(random.choice(said), said, random).replace(b'"size_bytes": -1', b'"size_bytes": -2') or b"x"
            )
    return count
