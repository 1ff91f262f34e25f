"""Key files: a process needs one to lead a run, or to join a run, across machines.

A key is 64 hexadecimal digits in a file that only its owner may read. It is never sent: a secret is derived from it,
and from that secret all credentials (credentials.py). Use one key per job or per group of people.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from distbelief.errors import DistBeliefError

KEY_BYTES = 32
HOW_TO_MAKE_ONE = (
    "make one with `distbelief keys new FILE`, and copy the file to the other machines (scp keeps it private)"
)


def new_key(path: Path) -> None:
    """Write a new key to a file that does not exist yet."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
    except FileExistsError:
        raise DistBeliefError(f"{path} exists already", hint="a key is never overwritten: name another") from None
    except OSError as error:
        raise DistBeliefError(
            f"cannot write a key to {path}: {error.strerror}", hint="name a file in a folder that you can write to"
        ) from error


def read_key(path: Path) -> bytes:
    """The key in a file. A file that other users could have read is refused."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode  # of the opened file: the name may stand for another file by now
            text = file.read(2 * KEY_BYTES + 3)
    except OSError as error:
        raise DistBeliefError(f"cannot read the key file {path}: {error.strerror}", hint=HOW_TO_MAKE_ONE) from error
    if mode & 0o077:
        raise DistBeliefError(
            f"the key file {path} can be read by others (its mode is {stat.S_IMODE(mode):03o})",
            hint=f"chmod 600 {path}; if another user may have read it, make a new key",
        )
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        digits = 2 * KEY_BYTES
        raise DistBeliefError(f"{path} holds no key: a key is {digits} hexadecimal digits", hint=HOW_TO_MAKE_ONE)
    return key


def run_secret(key: bytes) -> bytes:
    """The key's secret: the key itself stays in its file.

    >>> len(run_secret(bytes(32))), run_secret(bytes(32)) == bytes(32)
    (32, False)
    """
    return hashlib.blake2b(key=key, digest_size=32, person=b"distbelief-run").digest()


def required_key(path: Path | None, address: str) -> bytes:
    """The key for joining a run on another machine. Raises if no key file is given."""
    if path is None:
        raise DistBeliefError(
            f"to join the run at {address} you need its key file",
            hint="give --key FILE (or DISTBELIEF_KEY_FILE=FILE), the file that the run was started with; "
            "or join by its run directory, where you can read it",
        )
    return read_key(path)
