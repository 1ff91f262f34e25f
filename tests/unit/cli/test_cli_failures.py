"""Files and directories of other people, on the command line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distbelief.cli.failures import of_the_system
from distbelief.cli.main import app

_WITHOUT_ROOTS_RIGHTS = (
    ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    if os.geteuid() == 0
    else []
)
_SCRIPT = """
import shlex, sys
from typer.testing import CliRunner
from distbelief.cli.main import app
for command in sys.argv[1:]:
    done = CliRunner().invoke(app, shlex.split(command))
    print(done.exit_code, repr(done.exception), done.output.replace(chr(10), " "), sep="|")
"""


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root without setpriv may read all")
def test_nothing_of_other_people_is_a_traceback(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "run").mkdir(parents=True)
    theirs.chmod(0)
    (tmp_path / "job.py").write_text("")
    run = theirs / "run"
    commands = [
        *(f"{name} {run}" for name in ("attach", "resume", "replay", "stop", "scale --servers 2", "checkpoint")),
        *(f"profile {run}", f"worker --join {run}", f"export {run} --to {tmp_path}/w.safetensors"),
        f"chaos {tmp_path}/job.py --faults 'fill disk for 2s' --run-dir {run}",
        *(f"train {theirs}/job.py", f"new {theirs}/job.py", f"average {run} {run} --to {tmp_path}/w.safetensors"),
    ]
    done = subprocess.run(
        [*_WITHOUT_ROOTS_RIGHTS, sys.executable, "-c", _SCRIPT, *commands],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    theirs.chmod(0o700)
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands)
    for command, line in zip(commands, lines, strict=True):
        status, exception, output = line.split("|", 2)
        assert (status, exception) == ("1", "SystemExit(1)"), command
        assert "Permission denied" in output, command
        assert "theirs" in output, command


def test_a_path_that_cannot_be_is_one_sentence_also_as_json(tmp_path: Path) -> None:
    long = "x" * 5000
    done = CliRunner().invoke(app, ["attach", "--json", f"{tmp_path}/{long}"])
    assert done.exit_code == 1
    answer = json.loads(done.stdout.splitlines()[-1])
    assert "File name too long" in answer["error"]
    assert len(answer["error"]) < 500


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "of a socket"), FileNotFoundError(errno.ENOENT, "gone", "x")])
def test_other_errors_of_the_system_keep_their_traceback(error: OSError) -> None:
    assert of_the_system(error) is None
