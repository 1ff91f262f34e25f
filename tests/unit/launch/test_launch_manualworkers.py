"""The socket at which workers that a user starts by hand reach the launching process."""

from __future__ import annotations

import secrets
import stat
from pathlib import Path

import pytest

from distbelief.control.messages import SECRET_BYTES
from distbelief.errors import DistBeliefError
from distbelief.launch.manualworkers import SOCKET, ManualWorkers, connected, local_folder

WITHOUT_SOCKETS = Path("/proc/self/task")  # a file system that takes no file of anybody


@pytest.mark.parametrize("run_dir", [None, WITHOUT_SOCKETS])
def test_a_worker_finds_the_socket_where_the_run_directory_can_and_cannot_have_one(
    tmp_path: Path, run_dir: Path | None
) -> None:
    secret = secrets.token_bytes(SECRET_BYTES)
    folder = run_dir or tmp_path
    workers = ManualWorkers(folder, secret)
    try:
        assert (tmp_path / SOCKET).exists() == (run_dir is None)
        local = local_folder(secret)
        assert local.exists() == (run_dir is not None)
        if run_dir:
            assert stat.S_IMODE(local.stat().st_mode) == 0o700
        with connected(folder, secret):
            workers.listener.settimeout(60)
            workers.listener.accept()[0].close()
    finally:
        workers.close()
    assert not local_folder(secret).exists(), "nothing is left behind"
    with pytest.raises(OSError):  # the launching process is gone
        connected(folder, secret).__enter__()


def test_a_folder_that_others_could_have_made_is_not_used() -> None:
    secret = secrets.token_bytes(SECRET_BYTES)
    local_folder(secret).mkdir(mode=0o755)
    try:
        with pytest.raises(DistBeliefError, match="belongs to another user, or others can read it"):
            ManualWorkers(WITHOUT_SOCKETS, secret)
        with pytest.raises(DistBeliefError, match="belongs to another user"):
            connected(WITHOUT_SOCKETS, secret).__enter__()
    finally:
        local_folder(secret).rmdir()
