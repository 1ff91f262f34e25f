"""Runs all checks of one host, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from distbelief.control.addresses import host_name
from distbelief.doctor.checks import disk, gpu, limits, network, processor, software
from distbelief.doctor.rules.report import Host


def examine(run_dir: Path, together: bool, say: Callable[[str], None], name: str = "") -> Host:
    """Examine this machine. `together`: other hosts will take part."""
    say("software and processor")
    versions, cpu, multiplied = software.probe_software(), processor.probe_processor(), processor.probe_products()
    say("memory and disk")
    room = limits.probe_memory()
    shared, files, place = limits.probe_sharedmemory(room.room), limits.probe_openfiles(), disk.probe(run_dir)
    say("network")
    machine = network.probe_cards()
    reachable = network.probe_ports([one for card in machine.cards for one in card.usable[:1]])
    say("GPUs")
    gpus = gpu.probe()
    findings = [
        software.judge_software(versions),
        processor.judge_processor(cpu),
        processor.judge_products(multiplied),
        limits.judge_memory(room),
        limits.judge_sharedmemory(shared),
        limits.judge_openfiles(files),
        disk.judge(place),
        network.judge_cards(machine, together),
        network.judge_ports(reachable),
        *gpu.judge(gpus),
        software.judge_leftovers(software.probe_leftovers()),
    ]
    return Host(name or host_name(), {**versions.facts(), **cpu.facts()}, findings)
