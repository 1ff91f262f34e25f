"""What the leading process makes of its place, and that the others hear of its end whatever it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from distbelief import api
from distbelief.control.credentials import KeyAuthority
from distbelief.errors import DistBeliefError, JobError
from distbelief.launch import rendezvous
from distbelief.launch.launch import LOOPBACK_ONLY, Invitation, Launch, keep_launch
from distbelief.launch.launchers import run
from distbelief.launch.launchers.rules.place import Place
from distbelief.launch.launchers.run import LauncherRequest, find_place, leading, run_folder
from distbelief.launch.launchers.samehost import HelpingProcess
from distbelief.launch.pollloop import signals_blocked
from distbelief.launch.rendezvous import Notice, SharedFolder
from distbelief.observe.plain import PlainView
from distbelief.options import RunOptions
from distbelief.worker.spec import JobSource

LAUNCH = Launch(Path("/run"), RunOptions(4, "ps:sync:servers=2"))
AUTHORITY = KeyAuthority(bytes(32), "start")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.5)
    monkeypatch.setattr(run, "mpi4py_is_installed", lambda: False)


def place(index: int = 0, count: int = 4, local: tuple[int, int] = (0, 2), launcher: str = "slurm") -> Place:
    job = f"{os.getpid()} {time.monotonic_ns()}"
    return Place(launcher, job, index, count, *local, host="n1", peers=("n1", "n2"))


def test_on_one_host_only_loopback_is_listened_on() -> None:
    with leading(LauncherRequest("mpi", "digits"), place(0, 1, (0, 1), "mpi")) as lead:
        launch = lead.arrange(LAUNCH)
        lead.announce("tcp://127.0.0.1:1", AUTHORITY)
    at = launch.placement
    assert (at.listen, at.is_open, at.local_workers, at.room) == (LOOPBACK_ONLY, False, 1, 1)
    assert launch.usable_transport == "auto", "they share memory"
    assert at.blocks_signals


def test_on_several_hosts_others_are_let_in_and_the_invitation_is_gone_in_the_end(tmp_path: Path) -> None:
    first = place(0, 3, (0, 1))
    asked = LauncherRequest("slurm", "digits", run_dir=tmp_path / "run", listen="tcp://10.0.0.1:*")
    with leading(asked, first.with_workers(6)) as lead:
        launch = lead.arrange(LAUNCH)
        assert (lead.workers, lead.run_dir) == (6, tmp_path / "run")
        lead.announce("tcp://10.0.0.1:5", AUTHORITY)
        found = SharedFolder(tmp_path / "run", first.job).wait(5)
        assert found == Invitation("tcp://10.0.0.1:5", AUTHORITY.run)
    at = launch.placement
    assert (at.listen, at.is_open, at.local_workers, at.room) == ("tcp://10.0.0.1:*", True, 2, 2)
    assert (at.on, at.host, at.local_servers) == ("slurm", "n1", -1)
    assert list((tmp_path / "run").iterdir()) == []


def test_every_host_reads_the_notice(tmp_path: Path) -> None:
    """The first of them must not take it away."""
    first = place(0, 3, (0, 1))
    asked = LauncherRequest("slurm", "digits", run_dir=tmp_path / "run")
    SharedFolder(tmp_path / "run", first.job).tell(Notice(over=3))
    with ThreadPoolExecutor(1) as beside:
        for index in (1, 2):
            other = beside.submit(run._take_part, asked, replace(first, index=index))
            assert other.result(60) == 3


def test_what_ends_the_leading_process_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = place()

    def sleep(seconds: float) -> None:
        if seconds == rendezvous.LINGER_S:  # on a busy machine the other process may need longer to read the notice
            wait([other], 60)
        else:
            time.sleep(seconds)

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    asked = LauncherRequest("slurm", "digits", run_dir=tmp_path / "run")
    with ThreadPoolExecutor(2) as beside:
        helper = beside.submit(lambda: HelpingProcess(replace(first, index=1, local_index=1)).wait())
        other = beside.submit(lambda: SharedFolder(tmp_path / "run", first.job).wait(60))
        with pytest.raises(JobError, match="no such"), leading(asked, first):
            raise JobError("no such job")
        assert helper.result(60) == 2
        assert other.result(60) == 2
    assert not (tmp_path / "run").exists()


def test_strangers_need_a_key() -> None:
    far = replace(place(0, 2, (0, 1), "torchrun"), address="n1:29500")
    with (
        pytest.raises(DistBeliefError, match="need a key") as caught,
        leading(LauncherRequest("torchrun", "digits"), far),
    ):
        pass
    assert "distbelief keys new" in caught.value.hint


def test_all_processes_find_the_same_run_directory_and_the_next_launch_another() -> None:
    one, other = place(0), place(2, local=(0, 2))
    asked = LauncherRequest("slurm", "digits")
    assert run_folder(asked, one) == run_folder(asked, replace(other, job=one.job))
    assert run_folder(asked, one) != run_folder(asked, other)
    assert run_folder(LauncherRequest("slurm", "digits", run_dir=Path("here")), one) == Path("here")


def test_an_mpirun_that_cannot_be_found() -> None:
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(DistBeliefError, match="cannot find the mpirun"):
        find_place(LauncherRequest("mpi", "digits"), variables)


def test_a_run_can_be_resumed_where_there_is_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = replace(LAUNCH, run_dir=tmp_path, job=JobSource("/jobs/digits.py"))
    keep_launch(
        launched.placed(
            on="slurm",
            local_workers=1,
            room=1,
            is_open=True,
            listen="tcp://10.0.0.1:*",
            blocks_signals=True,
            key_file="/key",
        )
    )
    monkeypatch.setattr(api, "_run", lambda launch, view, announce: launch)
    resumed = api.resume_run(tmp_path, workers=None, strategy=None, view=PlainView(sys.stdout))
    assert resumed == replace(launched, resumed=True)


def test_what_is_sheltered_does_not_hear_a_signal_that_goes_to_everybody() -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); print(flush=True); input()"
    with signals_blocked(True):
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    child.stdin.write(b"\n")
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "we do"
