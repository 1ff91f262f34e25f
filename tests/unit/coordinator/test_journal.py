from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distbelief.atomicfile import replace_file
from distbelief.coordinator import journal as j
from distbelief.coordinator.journal import Journal
from distbelief.coordinator.rules.replay import resumed
from distbelief.coordinator.rules.state import RunConfig, resume
from distbelief.errors import DistBeliefError

ENTRIES = [{"kind": "generation", "generation": n, "reason": f"because \n of {n} ü"} for n in range(1, 4)]


def written(path: Path) -> bytes:
    with Journal.open(path) as journal:
        for entry in ENTRIES:
            journal.append(entry)
    return path.read_bytes()


def decisions(entries: list[dict]) -> list[dict]:
    return [entry for entry in entries if entry["kind"] != "epoch"]


def test_what_was_appended_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path)
    with Journal.open(path) as journal:
        assert decisions(journal.replayed) == ENTRIES


def test_records_are_plain_json_lines(tmp_path: Path) -> None:
    lines = written(tmp_path / "journal.jsonl").decode().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["epoch", "generation", "generation", "generation"]
    assert all("crc32" in json.loads(line) for line in lines)


def test_each_opening_is_a_new_durable_epoch(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for expected in (1, 2, 3):
        with Journal.open(path) as journal:
            assert journal.epoch == expected
            assert j.read(path)[-1]["epoch"] == expected


def test_an_epoch_in_any_record_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path) as journal:
        journal.append({"kind": "generation", "epoch": 7, "reason": "x"})
    with Journal.open(path) as journal:
        assert journal.epoch == 8


def test_a_torn_tail_is_cut_off_wherever_it_is_torn(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.jsonl")
    path = tmp_path / "journal.jsonl"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n")
        with Journal.open(path) as journal:
            assert decisions(journal.replayed) == ENTRIES[: max(0, complete - 1)]
            journal.append({"kind": "after", "reason": "still readable"})
        assert j.read(path)[-1]["kind"] == "after"


def test_a_last_line_with_lost_blocks_is_torn_too(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = written(path)
    path.write_bytes(whole[:-20] + b"\0" * 19 + b"\n")
    with Journal.open(path) as journal:
        assert decisions(journal.replayed) == ENTRIES[:-1]


@pytest.mark.parametrize("torn", [b"", b'{"kind":"half'])
def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    whole = written(path)
    second = whole.index(b"\n") + 1
    damaged = whole[: second + 12] + b"#" + whole[second + 13 :] + torn
    path.write_bytes(damaged)
    with pytest.raises(DistBeliefError, match=r"journal\.jsonl, line 2: the record is damaged"):
        Journal.open(path)
    assert path.read_bytes() == damaged, "a damaged journal must be left for people to look at"
    path.unlink()
    Journal.open(path).close()  # the failed opening holds no lock


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = written(path)
    first_end = whole.index(b"\n")
    for place in range(first_end):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DistBeliefError, match="line 1"):
            j.read(path)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    script = (
        "import sys; from pathlib import Path\n"
        "from distbelief.coordinator.journal import Journal\n"
        "from distbelief.errors import DistBeliefError\n"
        "try:\n    Journal.open(Path(sys.argv[1])).close()\n"
        "except DistBeliefError as error:\n    print(error.message, '|', error.hint); sys.exit(9)\n"
    )
    attempt = [sys.executable, "-c", script, str(path)]
    with Journal.open(path):
        done = subprocess.run(attempt, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 9, done.stderr
        assert "another coordinator is running this run" in done.stdout
        assert "--run-dir" in done.stdout
    assert subprocess.run(attempt, timeout=300, check=False).returncode == 0


def test_a_full_disk_raises_and_leaves_the_journal_readable(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from distbelief.coordinator.journal import Journal\n"
        "journal = Journal.open(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))\n"
        "journal.append({'kind': 'fits', 'reason': 'x'})\n"
        "try:\n    journal.append({'kind': 'big', 'reason': 'x' * 400}); sys.exit(8)\n"
        "except OSError:\n    journal.append({'kind': 'small', 'reason': 'disk full'}); sys.exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, timeout=300, check=False)
    assert done.returncode == 9, done.stderr
    assert [entry["kind"] for entry in j.read(path)] == ["epoch", "fits", "small"]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="cannot write the journal"):
        Journal.open(tmp_path / "nowhere" / "journal.jsonl")
    with pytest.raises(DistBeliefError, match="cannot read the journal"):
        j.read(tmp_path / "nowhere" / "journal.jsonl")


def test_nothing_is_left_open(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Journal.open(path) as journal:
            journal.append(ENTRIES[0])
            with pytest.raises(DistBeliefError):
                Journal.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_damaged_journal_is_replace_damaged_and_no_number_of_it_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path) as journal:
        journal.append({"kind": "hired", "workers": [0, 1], "reason": "x"})
        journal.append({"kind": "damaged later", "reason": "x"})
        journal.append({"kind": "generation", "generation": 9, "members": [{"worker": 7}], "epoch": 4, "reason": "x"})
        journal.append({"kind": "servers_hired", "servers": [3], "reason": "x"})
    damaged = path.read_bytes().replace(b"damaged later", b"damaged LATER")
    path.write_bytes(damaged)
    kept = j.replace_damaged(path)
    assert (kept.name, kept.read_bytes()) == ("journal-damaged-1.jsonl", damaged)
    first, hired, note = j.read(path)
    assert (first["kind"], hired["workers"]) == ("epoch", [0, 1])
    assert {name: note[name] for name in ("kind", "epoch", "generation", "next_worker", "next_server")} == {
        "kind": "damaged",
        "epoch": 4,
        "generation": 9,
        "next_worker": 8,
        "next_server": 4,
    }
    assert "line 3 of journal-damaged-1.jsonl" in note["reason"]
    with Journal.open(path) as journal:
        assert journal.epoch == 5
        state = resume(RunConfig(workers=2), journal.epoch, 0.0, journal.replayed)
        record = resumed(state, "allreduce", 0.0)
        assert record["workers"] == [8, 9]
        state = resume(RunConfig(workers=2), journal.epoch, 0.0, [*journal.replayed, record])
        assert (state.generation, state.taken_over, state.fleet.next_server) == (9, 9, 4)


def test_a_replacement_that_fails_half_way_leaves_the_damaged_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path) as journal:
        journal.append({"kind": "one", "reason": "x"})
        journal.append({"kind": "two", "reason": "x"})
    damaged = path.read_bytes().replace(b'"one"', b'"ONE"')
    path.write_bytes(damaged)

    def is_full(at: Path, content: bytes, **how: bool) -> None:
        if at == path:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(at, content, **how)

    monkeypatch.setattr(j, "replace_file", is_full)
    with pytest.raises(DistBeliefError, match="cannot replace the journal"):
        j.replace_damaged(path)
    assert path.read_bytes() == damaged
    monkeypatch.undo()
    assert j.replace_damaged(path).read_bytes() == damaged
    assert [one["kind"] for one in j.read(path)] == ["epoch", "damaged"]


NO_LOCKS = """
import ctypes, errno, struct, sys
from pathlib import Path
# A seccomp filter: for this process the kernel has no flock, as for one on a file system without locks.
FLOCK = {"x86_64": 73, "aarch64": 32}[__import__("platform").machine()]
code = [(0x20, 0, 0, 0), (0x15, 0, 1, FLOCK), (0x06, 0, 0, 0x00050000 | errno.ENOLCK), (0x06, 0, 0, 0x7FFF0000)]
program = b"".join(struct.pack("HBBI", *one) for one in code)
buffer = ctypes.create_string_buffer(program)
filter = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.create_string_buffer(filter), 0, 0):
    sys.exit(77)
from distbelief.coordinator.journal import Journal
from distbelief.errors import DistBeliefError
from distbelief.launch.rundir import check_idle
path = Path(sys.argv[1])
check_idle(path.parent)
try:
    Journal.open(path)
except DistBeliefError as error:
    print(error.message, "|", error.hint)
"""


def test_a_file_system_without_locks_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.with_name("journal.jsonl.lock").touch()
    done = subprocess.run(
        [sys.executable, "-c", NO_LOCKS, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode == 77:
        pytest.skip("this kernel lets a process set up no seccomp filter")
    assert done.returncode == 0, done.stderr
    assert f"the file system of {tmp_path} has no locks (No locks available)" in done.stdout
    assert "--checkpoints" in done.stdout
    assert not path.exists()
