"""The rendezvous of a launch on several hosts: processes find the leading one by an address, a store, a folder or MPI.

The leading process publishes one notice: the invitation to its run, or that there is no run. The secret of a run is in
no variable and on no command line, where other users could read it. A notice opens one start of one run only, as does
the file `coordinator.json` in the run directory; with a key file a notice opens nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from distbelief.atomicfile import replace_file
from distbelief.control.addresses import cards, host_name, resolve, route_to, tcp
from distbelief.control.credentials import Authority, KeyAuthority
from distbelief.control.keyfiles import read_key, run_secret
from distbelief.errors import DistBeliefError
from distbelief.launch.launch import Invitation
from distbelief.launch.launchers.rules.place import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

PATIENCE_S = 300.0
"""Seconds for which the other processes wait for the first one, which reads the job and starts the coordinator."""

LINGER_S = 3.0
"""Seconds for which the first process leaves the notice that no run takes place."""


class Notice(msgspec.Struct, frozen=True):
    """The first process's message: the invitation to its run, or that no run will take place."""

    address: str = ""
    run: Authority | None = None
    """None, as it is published, if all processes have the key file."""
    over: int = -1
    """0 or above: no run takes place, and the process ends with this exit status."""


def _published(notice: Notice, key: Path | None) -> Notice:
    return msgspec.structs.replace(notice, run=None) if key else notice


def _invitation(notice: Notice, key: Path | None) -> Invitation | int:
    """See `Rendezvous.wait`."""
    if notice.over >= 0:
        return notice.over
    if (notice.run is None) == (key is None):
        had, lacks = ("the first process", "this one") if key is None else ("this process", "the first one")
        raise DistBeliefError(
            f"{had} of the launch was given a key file (--key), and {lacks} was not",
            hint="give --key FILE to all processes of a launch, or to none",
        )
    return Invitation(notice.address, notice.run or _access(key))


def _access(key: Path | None) -> KeyAuthority:
    assert key is not None
    return KeyAuthority(run_secret(read_key(key)))


class Rendezvous(Protocol):
    """A way in which the processes of a launch find the first one."""

    def listen(self) -> str:
        """First process: the ZeroMQ address at which its coordinator is to listen."""

    def key_file(self) -> Path | None:
        """The key file that both sides have. None: the notice carries the run's secret."""

    def known(self) -> tuple[str, KeyAuthority] | None:
        """The coordinator's address and the authority, if all processes know them without a notice."""

    def tell(self, notice: Notice) -> None:
        """First process: publish the notice."""

    def wait(self) -> Invitation | int:
        """Any other process: the first process's invitation, or the exit status because no run takes place."""

    def close(self) -> None:
        """First process: withdraw the notice."""


# --- the address of this machine that other hosts can reach -----------------------------------------------------------


_FAR_AWAY = ("198.51.100.1", "2001:db8::1")  # in no network: kept for documents


def address_for(peers: Iterable[str]) -> str:
    """The address from which this machine sends packets to one of the peers. If no peer is known by name: the address
    of this machine's own name, or the address towards the internet, or the only address. Without a network: loopback.
    """
    mine = _own_addresses()
    if not mine:
        return "127.0.0.1"
    for peer in peers:
        for address in resolve(peer):
            if address not in mine and (source := _source_towards(address)) in mine:
                return source
    for address in resolve(host_name()):
        if address in mine:
            return address
    usual = [source for far in _FAR_AWAY if (source := _source_towards(far)) in mine]
    if usual or len(mine) == 1:
        return (usual or mine)[0]
    raise DistBeliefError(
        f"this machine has several addresses, and it is not clear which one the other hosts reach: {', '.join(mine)}",
        hint="name it: --listen ADDRESS",
    )


def address_behind(name: str) -> str:
    """The address of this machine to which the name resolves."""
    if name in ("localhost", "127.0.0.1", "::1"):
        return name.replace("localhost", "127.0.0.1")
    found = resolve(name)
    mine = _own_addresses()
    for address in found:
        if address in mine:
            return address
    raise DistBeliefError(
        f"the other processes look for this one at {name}, which is none of the addresses of this machine "
        f"({', '.join(mine)})",
        hint="is it on the right host? is the name in /etc/hosts one of a loopback address?",
    )


def _own_addresses() -> list[str]:
    """The addresses that other hosts can reach, IPv4 first."""
    usable = [address for card in cards() for address in card.usable]
    return sorted(usable, key=lambda text: ":" in text)


def _source_towards(address: str) -> str:
    try:
        return route_to(address).source
    except OSError:
        return ""


# --- at an address ----------------------------------------------------------------------------------------------------


class KnownAddress:
    """Every process knows the address and has the key, so nothing is published. `where`: HOST:PORT of the first
    process, at which the coordinator listens."""

    def __init__(self, where: str, key: Path) -> None:
        self._host, self._port = split(where)
        self._key = key

    def listen(self) -> str:
        return tcp(address_behind(self._host), self._port)

    def key_file(self) -> Path:
        return self._key

    def known(self) -> tuple[str, KeyAuthority]:
        return self.listen(), _access(self._key)

    def tell(self, notice: Notice) -> None:
        """The other processes know the address already."""

    def wait(self) -> Invitation:
        return Invitation(tcp(self._host, self._port), _access(self._key))

    def close(self) -> None:
        pass


class LauncherStore:
    """The launcher keeps a store for short texts at that address; the first process writes there where its coordinator
    listens. Every process can reach the store, but a process without the key can neither pose as the coordinator nor
    join."""

    def __init__(self, where: str, job: str, key: Path, patience_s: float = PATIENCE_S) -> None:
        self._host, self._port = split(where)
        self._name = f"distbelief {job}"
        self._key = key
        self._patience_s = patience_s
        self._opened: TCPStore | None = None

    def listen(self) -> str:
        self._opened = self._open()  # now: the first process is busy while it leads
        return tcp(address_behind(self._host))

    def key_file(self) -> Path:
        return self._key

    def known(self) -> None:
        return None

    def tell(self, notice: Notice) -> None:
        text = notice.address if notice.over < 0 else f"over {notice.over}"
        (self._opened or self._open()).set(self._name, text)
        if notice.over >= 0:
            time.sleep(LINGER_S)

    def wait(self) -> Invitation | int:
        try:
            text = self._open().get(self._name).decode(errors="replace")
        except RuntimeError as error:
            raise DistBeliefError(
                f"the first process of this launch has published no address at {self._host}:{self._port}",
                hint="look at the output of the first host",
            ) from error
        if text.startswith("over "):
            status = text.removeprefix("over ")
            return int(status) if status.isdecimal() else 1
        return Invitation(text, _access(self._key))

    def _open(self) -> TCPStore:
        from torch._C._distributed_c10d import (
            TCPStore,  # the import takes seconds; only this kind of rendezvous needs it
        )

        return TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=self._patience_s))

    def close(self) -> None:
        pass


def split(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    return host.strip("[]"), int(port)


# --- in a folder ------------------------------------------------------------------------------------------------------


FILE = "rendezvous.json"
_LOOK_S = 0.2


class _Note(msgspec.Struct, frozen=True):
    job: str
    """The launch of the notice (Place.job)."""
    notice: Notice


class SharedFolder:
    """The notice is a private file in a folder that all hosts see, the run directory. It names its launch, so that the
    notice of a killed launch means nothing to the next one. The first process removes it at the end. `key`: the key
    file that all hosts have; without it the notice holds the run's secret."""

    def __init__(self, folder: Path, job: str, peers: Sequence[str] = (), key: Path | None = None) -> None:
        self._path = folder / FILE
        self._job = job
        self._peers = peers
        self._key = key
        self._called_off = False

    def listen(self) -> str:
        return tcp(address_for(self._peers))

    def key_file(self) -> Path | None:
        return self._key

    def known(self) -> None:
        return None

    def tell(self, notice: Notice) -> None:
        folder = self._path.parent
        note = _Note(self._job, _published(notice, self._key))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(note), private=True)
        except OSError as error:
            raise DistBeliefError(
                f"cannot publish the run's address in {folder}: {error.strerror}",
                hint="give a --run-dir on a disk that all hosts share and that you can write to",
            ) from error
        self._called_off = notice.over >= 0

    def wait(self, patience_s: float = PATIENCE_S) -> Invitation | int:
        until = time.monotonic() + patience_s
        while (notice := self._found()) is None:
            if time.monotonic() > until:
                raise DistBeliefError(
                    f"the first process of this launch has published no address in {self._path.parent}",
                    hint="is that folder on a disk that all hosts share? give one with --run-dir",
                )
            time.sleep(_LOOK_S)
            with contextlib.suppress(OSError):
                os.listdir(self._path.parent)  # list it, because a network disk may cache that the file does not exist
        return _invitation(notice, self._key)

    def _found(self) -> Notice | None:
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_uid != os.getuid() or about.st_mode & 0o077:
                    return None  # another user may have written it, and we would run that user's job
                note = msgspec.json.decode(file.read(), type=_Note)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return None
        except OSError as error:
            raise DistBeliefError(
                f"cannot read {self._path}: {error.strerror}", hint="does the run directory belong to your user?"
            ) from error
        return note.notice if note.job == self._job else None

    def close(self) -> None:
        """Remove the notice, and the folder if the run has not even begun."""
        if self._called_off:
            time.sleep(LINGER_S)
        with contextlib.suppress(DistBeliefError):
            if self._found() is not None:
                self._path.unlink(missing_ok=True)
        if self._called_off:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()  # only if it is empty: the run did not even begin


# --- by MPI -----------------------------------------------------------------------------------------------------------


_MPI_BYTES = 1024
_MPI_LOOK_S = 0.05


def mpi4py_is_installed() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


class MpiBroadcast:
    """Broadcasts the notice by MPI itself, where mpi4py is installed. Every process of the launch makes one, and calls
    `tell` or `wait` once. MPI is then finalized: workers, which start later, are no MPI programs, and mpirun ignores
    their deaths. `key`: the key file that all hosts have; without it MPI carries the run's secret, unencrypted."""

    def __init__(self, place: Place, key: Path | None = None) -> None:
        import mpi4py

        self._key = key

        if "OMPI_COMM_WORLD_RANK" in os.environ:  # several MPI libraries may be installed: load the one of this mpirun
            os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise DistBeliefError(
                f"mpi4py cannot find the MPI library: {error}",
                hint="install it on every host, or uninstall mpi4py: without it the rendezvous uses the run directory",
            ) from error
        self._mpi: Any = MPI
        MPI.Init()
        world = MPI.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (place.index, place.count):
            raise DistBeliefError(
                f"mpi4py takes this for process {world.Get_rank()} of {world.Get_size()}, mpirun for {place.index} of "
                f"{place.count}: it uses another MPI library",
                hint="install mpi4py for the library of this mpirun, or uninstall it",
            )

    def listen(self) -> str:
        return tcp(address_for([]))

    def key_file(self) -> Path | None:
        return self._key

    def known(self) -> None:
        return None

    def tell(self, notice: Notice) -> None:
        self._broadcast(msgspec.json.encode(_published(notice, self._key)))

    def wait(self) -> Invitation | int:
        return _invitation(msgspec.json.decode(self._broadcast(b""), type=Notice), self._key)

    def _broadcast(self, content: bytes) -> bytes:
        buffer = bytearray(content.ljust(_MPI_BYTES))
        request = self._mpi.COMM_WORLD.Ibcast([buffer, self._mpi.BYTE], root=0)
        while not request.Test():  # MPI's own waiting would keep a core busy
            time.sleep(_MPI_LOOK_S)
        self._mpi.Finalize()  # mpirun takes a process that ends without Finalize for dead, and ends all others
        return bytes(buffer).strip()

    def close(self) -> None:
        pass
