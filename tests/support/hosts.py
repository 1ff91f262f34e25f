"""Several hosts on one machine: each is a network namespace with a name, a cable and addresses of its own.

In tests: `with Lab(3) as lab: subprocess.run([*lab.inside(2), "ip", "address"])`. By hand, as root:

    python -m tests.support.hosts 4 -- ping -c 1 10.77.0.1
    python -m tests.support.hosts 4 --impair "delay 20ms 5ms loss 1%" -- COMMAND --as {host} --at {address}
    python -m tests.support.hosts 2                  # only makes them, says how to enter, and waits for Ctrl-C

Host k is called `hostK`, has the addresses 10.77.0.k and fd77::k, and knows the others by name. Labs do not see each
other: any number can be there at once. What a killed one left behind, the next one removes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.support import cable

GRACE_S = 10.0  # how long commands may take to end after Ctrl-C
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && export DISTBELIEF_HOST="$1" HOST_INDEX="$3"; '
_ENTER += 'shift 3 && exec "$@"'


class Lab:
    """Hosts on one switch. Host k has the addresses 10.77.0.k and fd77::k; its cable ends in the switch's port k."""

    def __init__(self, hosts: int) -> None:
        _sweep()
        self.hosts = range(1, hosts + 1)
        self._name = f"db{os.getpid()}x{uuid.uuid4().hex[:4]}"
        self._stack = contextlib.ExitStack()
        self._cables: dict[int, subprocess.Popen[str]] = {}
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"{self._name}-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._names = folder / "hosts"
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{self.address(k, family)} {self.name(k)}" for k in self.hosts for family in (4, 6)]
        self._names.write_text("\n".join(lines) + "\n")
        self._add("sw")
        self.switch("ip", "link", "add", "bridge", "type", "bridge")
        self.switch("ip", "link", "set", "bridge", "up")
        for host in self.hosts:
            space = self._add(f"h{host}")
            port = f"port{host}"
            _run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self._sw)
            self.switch("ip", "link", "set", port, "master", "bridge")
            self.switch("ip", "link", "set", port, "up")
            self.on(host, "ip", "link", "set", "lo", "up")
            self.on(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            # Nobody else has it: without a check for that it can be used at once.
            self.on(host, "ip", "address", "add", f"{self.address(host, 6)}/64", "dev", "eth0", "nodad")
            self.on(host, "ip", "link", "set", "eth0", "up")

    def _add(self, name: str) -> str:
        space = f"{self._name}{name}"
        _run("ip", "netns", "add", space)
        self._stack.callback(subprocess.run, ["ip", "netns", "delete", space], check=False, capture_output=True)
        return space

    @property
    def _sw(self) -> str:
        return f"{self._name}sw"

    @staticmethod
    def name(host: int) -> str:
        return f"host{host}"

    @staticmethod
    def address(host: int, family: int = 4) -> str:
        return f"10.77.0.{host}" if family == 4 else f"fd77::{host}"

    def inside(self, host: int) -> list[str]:
        """What to put before a command so that it runs on that host."""
        space = ["ip", "netns", "exec", f"{self._name}h{host}", "unshare", "--uts", "--mount"]
        return [*space, "sh", "-c", _ENTER, "sh", self.name(host), str(self._names), str(host)]

    def on(self, host: int, *command: str) -> None:
        """Change something of a host's network."""
        _run("ip", "netns", "exec", f"{self._name}h{host}", *command)

    def switch(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._sw, *command)

    def call(self, host: int, name: str) -> None:
        """From now on this name, too, leads to the host: as a cluster's name server does when a pod is replaced."""
        lines = [line for line in self._names.read_text().splitlines() if line.split()[1] != name]
        self._names.write_text("\n".join([*lines, f"{self.address(host)} {name}"]) + "\n")

    def cut(self, host: int) -> None:
        self.switch("ip", "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        self.switch("ip", "link", "set", f"port{host}", "up")

    def impair(self, host: int, *how: str) -> None:
        """Make a host's cable bad, in both directions, in netem's words: delay 20ms 5ms · loss 1% · rate 10mbit.

        By netem, where the kernel has it; else by `cable.py`, which can do these three. `repair` undoes it.
        """
        if not self._by_netem(host, how):
            self._by_cable(host, how)

    def _by_netem(self, host: int, how: Sequence[str]) -> bool:
        try:
            self.switch("tc", "qdisc", "add", "dev", f"port{host}", "root", "netem", *how)
            self.on(host, "tc", "qdisc", "add", "dev", "eth0", "root", "netem", *how)
        except (subprocess.CalledProcessError, FileNotFoundError):
            return False
        return True

    def _by_cable(self, host: int, how: Sequence[str]) -> None:
        port, jack, plug = f"port{host}", f"jack{host}", f"plug{host}"
        if host in self._cables:
            raise ValueError(f"the cable of {self.name(host)} is a bad one already")
        self.switch("ip", "link", "add", jack, "type", "veth", "peer", "name", plug)
        self.switch("ip", "link", "set", port, "nomaster")
        self.switch("ip", "link", "set", plug, "master", "bridge")
        for name in (jack, plug):
            self.switch("ip", "link", "set", name, "up")
        badness = json.dumps(asdict(cable.parse(list(how))))
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._sw, sys.executable, "-S", cable.__file__, port, jack, badness],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._cables[host] = process
        self._stack.callback(_end, process)  # does nothing a second time
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the cable of {self.name(host)} cannot be made bad")

    def repair(self, host: int) -> None:
        """Undo `impair`."""
        process = self._cables.pop(host, None)
        if process is None:
            self.switch("tc", "qdisc", "del", "dev", f"port{host}", "root")
            self.on(host, "tc", "qdisc", "del", "dev", "eth0", "root")
            return
        _end(process)
        self.switch("ip", "link", "delete", f"jack{host}")  # and its other end
        self.switch("ip", "link", "set", f"port{host}", "master", "bridge")

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def why_not() -> str:
    """Why there can be no lab on this machine; empty: there can."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "iproute2 or util-linux is not installed: no network namespaces"
    try:
        Lab(1).close()
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.decode().strip()}"
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def _sweep() -> None:
    """Remove the namespaces of labs whose process is gone."""
    with contextlib.suppress(OSError):
        for space in os.listdir("/run/netns"):
            owner = re.match(r"db(\d+)x[0-9a-f]{4}(sw|h\d+)$", space)
            if owner and not Path(f"/proc/{owner[1]}").exists():
                subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


# --- by hand ---------------------------------------------------------------------------------------------------------


class Everywhere:
    """One command on every host of a lab, its lines prefixed with the host."""

    def __init__(self, lab: Lab, command: Sequence[str]) -> None:
        self.status = 0
        """Of the command that failed first."""
        self._lock = threading.Lock()
        self._processes = [self._start(lab, host, command) for host in lab.hosts]
        self._threads = [
            threading.Thread(target=self._follow, args=[lab.name(host), process])
            for host, process in zip(lab.hosts, self._processes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _start(lab: Lab, host: int, command: Sequence[str]) -> subprocess.Popen[str]:
        words = {"{host}": lab.name(host), "{address}": lab.address(host), "{address6}": lab.address(host, 6)}
        arguments = list(command)
        for word, value in words.items():
            arguments = [argument.replace(word, value) for argument in arguments]
        return subprocess.Popen(
            [*lab.inside(host), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches us alone, and we pass it on, once
            text=True,
            errors="replace",
        )

    def _follow(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                print(f"{name} | {line.rstrip()}", flush=True)
        status = process.wait()
        with self._lock:
            self.status = self.status or (status if status >= 0 else 128 - status)

    def wait(self, limit_s: float | None = None) -> None:
        """Until all have ended, and what they printed is shown."""
        for thread in self._threads:
            thread.join(limit_s)

    def end(self) -> None:
        """Pass Ctrl-C on; who does not go is made to."""
        for number, patience_s in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            until = time.monotonic() + patience_s
            while any(process.poll() is None for process in self._processes) and time.monotonic() < until:
                time.sleep(0.02)
        self.wait(1.0)


def main(arguments: Sequence[str]) -> int:
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, command = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.hosts",
        usage="%(prog)s HOSTS [--impair HOW] [-- COMMAND …]",
        description="Hosts on this machine, and a command on each: {host}, {address}, {address6} in it become its own.",
    )
    parser.add_argument("hosts", type=int, help="how many")
    parser.add_argument("--impair", default="", metavar="HOW", help='every cable: "delay 20ms 5ms loss 1%% rate 1gbit"')
    chosen = parser.parse_args(options)
    problem = why_not()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Lab(chosen.hosts) as lab:
        if chosen.impair:
            for host in lab.hosts:
                lab.impair(host, *chosen.impair.split())
        if not command:
            return _show(lab)
        everywhere = Everywhere(lab, command)
        try:
            everywhere.wait()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            everywhere.end()
            return 130
        return everywhere.status


def _show(lab: Lab) -> int:
    for host in lab.hosts:
        print(f"{lab.name(host)}  {lab.address(host)}  {lab.address(host, 6)}")
        print(f"    {shlex.join([*lab.inside(host), 'bash'])}")
    print("Ctrl-C takes them away again", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
