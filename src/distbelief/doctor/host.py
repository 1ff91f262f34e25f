"""All checks of one host, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distbelief.control.addresses import host_name
from distbelief.doctor.checks import (
    cards,
    disk,
    gpu,
    leftovers,
    memory,
    openfiles,
    ports,
    processor,
    products,
    sharedmemory,
    software,
)
from distbelief.doctor.rules.finding import Host


def examine(run_dir: Path, together: bool, say: Callable[[str], None], name: str = "") -> Host:
    """Look at this machine. `together`: other hosts are to take part."""
    say("software and processor")
    versions, cpu, multiplied = software.probe(), processor.probe(), products.probe()
    say("memory and disk")
    room = memory.probe()
    shared, files, place = sharedmemory.probe(room.room), openfiles.probe(), disk.probe(run_dir)
    say("network")
    machine = cards.probe()
    reachable = ports.probe([one for card in machine.cards for one in card.usable[:1]])
    say("GPUs")
    gpus = gpu.probe()
    findings = [
        software.judge(versions),
        processor.judge(cpu),
        products.judge(multiplied),
        memory.judge(room),
        sharedmemory.judge(shared),
        openfiles.judge(files),
        disk.judge(place),
        cards.judge(machine, together),
        ports.judge(reachable),
        *gpu.judge(gpus),
        leftovers.judge(leftovers.probe()),
    ]
    return Host(name or host_name(), {**versions.facts(), **cpu.facts()}, findings)
