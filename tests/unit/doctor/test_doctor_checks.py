"""What each check makes of what was found; and that what is found on this machine can be judged at all."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distbelief.control.addresses import Card, Machine
from distbelief.doctor.checks import disk, gpu, limits, network, processor, software
from distbelief.doctor.rules.report import Finding
from tests.support.house.tree import ROOT

GIB = 1 << 30
GOOD_SOFTWARE = software.Software("3.12.1", "2.13.0+cpu", "2.1", "", "")
GOOD_CPU = processor.Processor(8, 8, 0.0, "x86_64 AVX2", 8, 1.0)
GOOD_SHM = limits.SharedMemory("", -1, 8 * GIB, 8 * GIB)
GOOD_DISK = disk.Disk("/runs", "", 100 * GIB, 5e8, 0.002)
GOOD_PORTS = network.Ports({"127.0.0.1": "", "10.0.0.1": ""}, ["127.0.0.1"], 28000)
GOOD_GPU = gpu.Gpu(0, "H200", 140 * GIB, 139 * GIB, 0, "", 40, 0)
ETH = Card("eth0", ("10.0.0.1",))

Case = tuple[Callable[[], Finding], str, str]

PROBLEMS: list[Case] = [
    (lambda: software.judge_software(replace(GOOD_SOFTWARE, error="OSError: libtorch")), "libtorch", "pip install"),
    (lambda: software.judge_software(replace(GOOD_SOFTWARE, torch="2.4.1")), "torch 2.4.1", "2.13 or newer"),
    (lambda: software.judge_software(replace(GOOD_SOFTWARE, python="3.9.2")), "Python 3.9.2", "3.11 or newer"),
    (lambda: software.judge_software(replace(GOOD_SOFTWARE, driver="550.1")), "without CUDA", "with CUDA"),
    (lambda: processor.judge_processor(replace(GOOD_CPU, quota=0.5)), "0.5 cores", "cpu limit"),
    (lambda: processor.judge_processor(replace(GOOD_CPU, load=40.0)), "40.0 runnable processes", "fewer workers"),
    (lambda: limits.judge_memory(limits.Memory(8 * GIB, GIB // 2)), "537 MB of 8.59 GB", "fewer workers"),
    (
        lambda: limits.judge_memory(limits.Memory(8 * GIB, 8 * GIB, GIB, 1 << 28)),
        "268 MB are free",
        "container's memory",
    ),
    (
        lambda: limits.judge_sharedmemory(replace(GOOD_SHM, error="File too large", file_limit=1 << 20)),
        "RLIMIT",
        "ulimit -f",
    ),
    (
        lambda: limits.judge_sharedmemory(replace(GOOD_SHM, shm_total=1 << 26, shm_free=1 << 20)),
        "1.05 MB",
        "--shm-size",
    ),
    (lambda: limits.judge_sharedmemory(replace(GOOD_SHM, shm_free=1 << 20)), "1.05 MB", "left there"),
    (lambda: limits.judge_openfiles(limits.OpenFiles(256, 4096)), "256 open", "ulimit -n"),
    (lambda: limits.judge_openfiles(limits.OpenFiles(256, 512)), "256 open", "limits.conf"),
    (lambda: disk.judge(disk.Disk("/runs", "Read-only file system")), "/runs cannot be written", "--run-dir"),
    (lambda: disk.judge(replace(GOOD_DISK, free=1 << 20)), "1.05 MB free", "free some space"),
    (lambda: disk.judge(replace(GOOD_DISK, append_s=0.7)), "durable in 700 ms", "local one"),
    (lambda: disk.judge(replace(GOOD_DISK, bytes_per_s=1e6)), "1 MB/s", "local one"),
    (lambda: network.judge_cards(Machine([], [], lambda name: []), needed=True), "no card", "ip link"),
    (
        lambda: network.judge_ports(replace(GOOD_PORTS, tried={"10.0.0.1": "timed out"})),
        "10.0.0.1: timed out",
        "firewall",
    ),
    (lambda: network.judge_ports(replace(GOOD_PORTS, localhost=["10.0.0.1"])), "localhost is 10.0.0.1", "/etc/hosts"),
    (lambda: network.judge_ports(replace(GOOD_PORTS, free=10)), "10 ports for automatic use", "sysctl"),
    (lambda: gpu.judge([replace(GOOD_GPU, wrong=7)])[0], "7 numbers", "out of service"),
    (lambda: gpu.judge([replace(GOOD_GPU, error="CUDA error: ECC")])[0], "does not work", "out of service"),
    (lambda: gpu.judge([replace(GOOD_GPU, ecc_errors=2)])[0], "2 memory errors", "reset"),
    (lambda: gpu.judge([replace(GOOD_GPU, free=GIB)])[0], "1.07 GB of 150 GB", "nvidia-smi"),
    (lambda: gpu.judge([replace(GOOD_GPU, temperature=95)])[0], "95 °C", "cooling"),
    (
        lambda: software.judge_leftovers([software.Process(7, "distbelief.coordinator", orphan=True, stopped=False)]),
        "7 (distbelief.coordinator, left behind)",
        "kill -9 7",
    ),
]


@pytest.mark.parametrize(("judged", "found", "advice"), PROBLEMS)
def test_problems_are_named_with_what_to_do(judged: Callable[[], Finding], found: str, advice: str) -> None:
    finding = judged()
    assert finding.status == "problem"
    assert found in finding.found
    assert advice in finding.advice


def test_the_oldest_versions_are_those_that_the_package_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [one for one in project["dependencies"] if one.startswith("torch")]
    assert torch == f"torch>={'.'.join(map(str, software.OLDEST_TORCH))}"
    assert project["requires-python"] == f">={'.'.join(map(str, software.OLDEST_PYTHON))}"


def test_what_is_well() -> None:
    running = software.Process(7, "distbelief.coordinator", orphan=False, stopped=False)
    findings = [
        software.judge_software(GOOD_SOFTWARE),
        processor.judge_processor(GOOD_CPU),
        limits.judge_memory(limits.Memory(8 * GIB, 4 * GIB)),
        limits.judge_sharedmemory(GOOD_SHM),
        limits.judge_openfiles(limits.OpenFiles(1024, 4096)),
        limits.judge_openfiles(limits.OpenFiles(-1, -1)),
        disk.judge(GOOD_DISK),
        network.judge_cards(Machine([ETH], ["10.0.0.1"], lambda name: []), needed=True),
        network.judge_ports(GOOD_PORTS),
        *gpu.judge([GOOD_GPU]),
        software.judge_leftovers([running]),
        software.judge_leftovers([]),
    ]
    assert [finding for finding in findings if finding.status != "ok" or finding.advice] == []


def test_what_is_not_there_is_skipped() -> None:
    assert gpu.judge([])[0].status == "skipped"
    assert network.judge_cards(Machine([], [], lambda name: []), needed=False).status == "skipped"


# --- probing for real ------------------------------------------------------------------------------------------------


def test_a_folder_that_is_there_and_one_that_is_not_yet(tmp_path: Path) -> None:
    found = disk.probe(tmp_path / "runs" / "tonight")
    assert found.folder == str(tmp_path)
    assert found.error == ""
    assert found.bytes_per_s > 0 < found.append_s
    assert list(tmp_path.iterdir()) == [], "nothing is left there"


def test_a_folder_that_cannot_be_written() -> None:
    found = disk.probe(Path("/proc/self"))
    assert found.error
    assert disk.judge(found).status == "problem"


def test_a_limit_on_the_size_of_segments_is_found() -> None:
    """The limit holds for the whole process, so another one has it."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "from distbelief.doctor.checks import limits as s; print(s.judge_sharedmemory(s.probe_sharedmemory(1 << 30)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "status='problem'" in said
    assert "ulimit -f" in said


def test_this_machine() -> None:
    assert limits.probe_openfiles() == limits.OpenFiles(*resource.getrlimit(resource.RLIMIT_NOFILE))
    assert network.judge_ports(network.probe_ports([])).status == "ok"
    assert limits.probe_memory().total > 0
    assert limits.probe_sharedmemory(GIB).error == ""
    assert all(process.pid != os.getpid() for process in software.probe_leftovers())
    found = processor.probe_processor()
    assert 0 < found.usable <= found.cores
    assert found.facts()["instruction_set"] == found.instruction_set
    assert processor.probe_products().torch > 0
    assert software.probe_software().facts()["torch"]


def test_the_faster_library_is_named() -> None:
    assert "onednn" in processor.judge_products(processor.Products(120e9, 265e9)).found
    assert processor.judge_products(processor.Products(250e9, 265e9)).found.endswith(
        "250 GFLOP/s by torch, 265 by oneDNN"
    )
    assert processor.judge_products(processor.Products(250e9)).status == "ok"
    assert processor.judge_products(processor.Products()).status == "skipped"
