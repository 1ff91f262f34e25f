"""What containers and batch jobs are allowed: by the texts of their files, and in real control groups."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from distbelief.controlgroups import MemoryRoom, folders, memory_room, own_cpu_quota, own_memory_room, why_no_fork
from tests.support.runs.cgroup import limited

MB = 1 << 20

DOCKER_V2 = "0::/\n"
KUBERNETES_V2 = "0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice/cri-containerd-2.scope\n"
SLURM_V1 = """\
11:memory:/slurm/uid_1000/job_7/step_0
10:cpuset:/slurm/uid_1000/job_7
9:cpu,cpuacct:/slurm/uid_1000/job_7
8:pids:/user.slice
1:name=systemd:/user.slice
0::/user.slice
"""

STAT_V2 = """\
anon 2147483648
file 6442450944
kernel_stack 1048576
file_mapped 104857600
file_dirty 0
inactive_anon 1073741824
active_anon 1073741824
inactive_file 5368709120
active_file 1073741824
unevictable 0
"""
STAT_V1 = """\
cache 1073741824
rss 104857600
mapped_file 20971520
inactive_file 1048576
active_file 1048576
hierarchical_memory_limit 4294967296
total_cache 3221225472
total_mapped_file 1073741824
total_inactive_file 2147483648
total_active_file 536870912
"""


def test_page_cache_of_a_container_is_not_used_memory() -> None:
    """8 GiB of 8.5 are "used", of which 6 are the cache of files; 100 MiB of that are mapped code."""
    container = {"memory.max": f"{8704 * MB}\n", "memory.current": f"{8192 * MB}\n", "memory.stat": STAT_V2}
    assert memory_room([container]) == MemoryRoom(8704 * MB, 8704 * MB - 8192 * MB + 5120 * MB + 1024 * MB - 100 * MB)


def test_the_first_version_counts_the_groups_below_under_other_names() -> None:
    """Of the active pages more are mapped than there are, by shared memory: none of them counts as free."""
    job = {"memory.limit_in_bytes": f"{4096 * MB}", "memory.usage_in_bytes": f"{3900 * MB}", "memory.stat": STAT_V1}
    assert memory_room([job]) == MemoryRoom(4096 * MB, 196 * MB + 2048 * MB)


def test_the_tightest_group_on_the_path_counts() -> None:
    container = {"memory.max": "max\n", "memory.current": "5000\n"}
    pod = {"memory.max": "9000\n", "memory.current": "8000\n", "memory.stat": "inactive_file 500\n"}
    slice_ = {"memory.max": "100000\n", "memory.current": "99000\n"}
    assert memory_room([container, pod, slice_]) == MemoryRoom(100000, 1000)
    assert memory_room([container, {**pod, "memory.stat": ""}, slice_]) == MemoryRoom(9000, 1000)
    assert memory_room([container]) is None
    assert memory_room([]) is None


@pytest.mark.parametrize(
    "texts",
    [
        {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "100\n"},  # "no limit"
        {"memory.max": "1000"},  # the root group of version 2 has no memory.current
        {"memory.max": "", "memory.current": "x"},
    ],
)
def test_no_limit_and_half_a_limit(texts: dict[str, str]) -> None:
    assert memory_room([texts]) is None


def test_a_cache_above_the_usage_makes_no_room_beyond_the_limit() -> None:
    """The files are read one after the other."""
    assert memory_room([{"memory.max": "10", "memory.current": "4", "memory.stat": "inactive_file 6"}]) == MemoryRoom(
        10, 10
    )


def test_where_the_files_of_a_process_are() -> None:
    def found(membership: str, controller: str) -> list[str]:
        return [str(folder) for folder in folders(membership, controller)]

    assert found(DOCKER_V2, "memory") == [".", "unified"]
    pod = "kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice"
    assert found(KUBERNETES_V2, "memory")[:3] == [f"{pod}/cri-containerd-2.scope", pod, pod.rpartition("/")[0]]
    job = ["memory/slurm/uid_1000/job_7/step_0", "memory/slurm/uid_1000/job_7", "memory/slurm/uid_1000", "memory/slurm"]
    assert found(SLURM_V1, "memory")[:5] == [*job, "memory"]
    assert "cpu,cpuacct/slurm/uid_1000/job_7" in found(SLURM_V1, "cpu")
    assert "cpu/slurm/uid_1000/job_7" in found(SLURM_V1, "cpu")
    assert found("0::/../other\n", "memory") == [".", "unified"]  # of another container only our own root is seen
    assert found("", "memory") == found("nonsense", "memory") == []


def test_files_of_both_versions_are_read(tmp_path: Path) -> None:
    mine = tmp_path / "membership"
    mine.write_text("4:memory:/pod/job\n3:cpu,cpuacct:/pod\n0::/\n")
    for name in ("memory/pod/job", "cpu/pod"):
        (tmp_path / name).mkdir(parents=True)
    assert own_memory_room(tmp_path, mine) is None
    assert own_cpu_quota(tmp_path, mine) == 0
    (tmp_path / "memory/pod/memory.limit_in_bytes").write_text("2000\n")
    (tmp_path / "memory/pod/memory.usage_in_bytes").write_text("2500\n")
    (tmp_path / "cpu/pod/cpu.cfs_quota_us").write_text("50000\n")
    (tmp_path / "cpu/pod/cpu.cfs_period_us").write_text("100000\n")
    assert own_memory_room(tmp_path, mine) == MemoryRoom(2000, -500)
    assert own_cpu_quota(tmp_path, mine) == 0.5
    (tmp_path / "memory.max").write_text("100\n")  # and a hierarchy of version 2 beside them
    (tmp_path / "memory.current").write_text("90\n")
    (tmp_path / "cpu.max").write_text("25000 100000\n")
    assert own_memory_room(tmp_path, mine) == MemoryRoom(2000, -500)
    assert own_cpu_quota(tmp_path, mine) == 0.25


def test_why_a_fork_failed() -> None:
    full = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    groups = [("/a/b", {"pids.max": "max"}), ("/a", {"pids.max": "9", "pids.current": "9"}), ("/", {"pids.max": "99"})]
    said = why_no_fork(full, groups, 100)
    assert said.index("/a: 9, in use 9") < said.index("/: 99") < said.index("RLIMIT_NPROC: 100")
    assert "kernel.pid_max" in why_no_fork(full, [], -1)
    assert "ENOMEM" in why_no_fork(OSError(errno.ENOMEM, "Cannot allocate memory"), groups, 100)
    assert why_no_fork(OSError(errno.EMFILE, "Too many open files"), groups, 100) == "Too many open files"


LOOK = """
import os, sys
from distbelief.errors import NotEnoughMemory
from distbelief.transport.shm.memfd import allocate, free_memory_bytes
before = free_memory_bytes()
with open(sys.argv[1], "rb") as file:
    while file.read(1 << 20):
        pass
print(before, free_memory_bytes(), flush=True)
os.close(allocate(300 << 20, "what the cache has to make room for"))
try:
    allocate(700 << 20, "more than the container may have")
except NotEnoughMemory as error:
    print(error.message)
"""


def test_in_a_real_container_whose_memory_is_full_of_page_cache(tmp_path: Path) -> None:
    """The limit is that of the group around the process's own. The cache of a large file fills it; what is allocated
    then takes the place of the cache, and what cannot be had is refused, where the kernel would have killed."""
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(600 * MB)
    with limited({"memory": 512 * MB}) as outer:
        inner = outer.below("inner")
        command = [*inner.inside, sys.executable, "-c", LOOK, str(large)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    before, after = map(int, said[0].split())
    assert 400 * MB < before < 512 * MB
    assert before - after < 64 * MB, "the cache counts as used"
    assert "not enough memory for more than the container may have" in said[1]
