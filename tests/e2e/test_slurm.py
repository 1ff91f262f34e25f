"""A real Slurm: a controller and two nodes on this machine, without root's munge. A job is stopped and goes on."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distbelief.launch.rundir import is_complete
from tests.support.ports import free_port
from tests.support.runs.command import JOBS, MARK, REPOSITORY, processes_of
from tests.support.runs.reference import undisturbed

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("n1", "n2")
JOB = (JOBS / "small.py", "--set", "steps=40", "--set", "brake_s=0.3")

pytestmark = [
    pytest.mark.timeout(600),  # two turns of a batch system
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd wants to be root"),
    pytest.mark.skipif(
        any(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None for name in PROGRAMS),
        reason="Slurm is not installed (Debian: slurm-wlm)",
    ),
]

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "state").mkdir()
        ports = [free_port() for _ in range(3)]
        config = folder / "slurm.conf"
        config.write_text(
            CONFIG.format(host=platform.node().split(".")[0], user=getpass.getuser(), folder=folder, ports=ports)
        )
        path = f"{os.environ['PATH']}:/usr/sbin"
        self.mark = f"slurm {folder}"
        self._environment = {**os.environ, "PATH": path, "SLURM_CONF": str(config), MARK: self.mark}
        self._daemons = [self._daemon("slurmctld"), *(self._daemon("slurmd", "-N", node) for node in NODES)]
        self.until(lambda: self.ask("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"])

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self._folder / f"{'-'.join(command)}.log").open("wb")
        return subprocess.Popen([*command, "-D"], env=self._environment, stdout=log, stderr=log)

    def ask(self, *command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(
            words, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=300
        )
        return done.stdout.strip()

    def until(self, condition: Callable[[], object], limit_s: float = 150) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.ask("scontrol", "show", "jobs")
            time.sleep(0.2)

    def stop(self) -> None:
        self.ask("scancel", "-u", getpass.getuser())
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(30)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path)
    yield cluster
    cluster.stop()
    deadline = time.monotonic() + 20
    while (left := processes_of(cluster.mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [process.cmdline() for process in left] == []


def test_a_job_whose_time_is_up_saves_goes_back_into_the_queue_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distbelief", "slurm", JOB[0], "--nodes", "2", "--", *JOB[1:]]
    script = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    (tmp_path / "run.sbatch").write_text(script)
    (tmp_path / "brake").touch()
    job = slurm.ask("sbatch", "--parsable", "--output=out.log", "run.sbatch")
    out, run = tmp_path / "out.log", tmp_path / "runs" / f"small-slurm-{job}"
    slurm.until(lambda: out.exists() and "step 1/40" in out.read_text())
    slurm.ask("scancel", "--signal=USR1", "--batch", job)  # as Slurm does when the time is almost up
    slurm.until(lambda: slurm.ask("squeue", "-h", "-o", "%T") == "PENDING")
    assert "stopped by SIGTERM; the newest checkpoint is of step" in out.read_text()
    (tmp_path / "brake").unlink()
    time.sleep(3)  # Slurm does not start a job twice within a second or two
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    slurm.until(lambda: not slurm.ask("squeue", "-h"))
    said = out.read_text()
    assert is_complete(run), said
    assert "the run goes on from step" in said
    assert f"weights sha256: {undisturbed(*JOB)}" in said
    hosts = {host for line in said.splitlines() if "has joined, with room" in line for host in [line.split()[2]]}
    assert hosts == {"n2"}
