"""The kinds of faults of the soak. Each strikes, makes sure that it has struck, and puts right what users would.

A kind may return what ends it later: the loop of the soak calls that when the time is over. Where users would have to
act (a killed leading process is resumed, a host is started again), the kind does so too.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from tests.soak.cluster import ENDING_S, WANTED, Broken, Cluster, is_alive, until

HOUR_S = 3600.0
DEATH_S = 60.0


@dataclass(frozen=True)
class Struck:
    """What was done; and for a fault that lasts, its end."""

    detail: str
    for_s: float = 0.0
    undo: Callable[[], object] | None = None


Strike = Callable[[Cluster, random.Random], Struck]


def _gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def _kill(process: psutil.Process, what: str) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    until(lambda: _gone(process), DEATH_S, f"the death of {what} {process.pid}")
    return f"{what}, process {process.pid}"


def _freeze(process: psutil.Process, what: str, for_s: float) -> Struck:
    process.suspend()
    until(lambda: _gone(process) or process.status() == psutil.STATUS_STOPPED, DEATH_S, f"the freeze of {what}")

    def wake() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have been fenced: then it is gone
            process.resume()

    return Struck(f"{what}, process {process.pid}, for {for_s:.1f} s", for_s, wake)


def _worker(cluster: Cluster, dice: random.Random) -> tuple[psutil.Process, str]:
    def living() -> list[dict[str, Any]]:
        return [member for member in cluster.members() if is_alive(int(member["pid"]))]

    until(living, ENDING_S, "a generation with a living member")
    member = dice.choice(living())
    return psutil.Process(int(member["pid"])), f"worker {member['worker']} of {member['host']}"


def _any_of(cluster: Cluster, dice: random.Random, role: str) -> psutil.Process:
    """Another fault may have struck a moment ago: then the next process of that role is waited for."""
    until(lambda: cluster.by_role().get(role), ENDING_S, f"the start of a {role}")
    return dice.choice(cluster.by_role()[role])


# --- processes --------------------------------------------------------------------------------------------------------


def kill_worker(cluster: Cluster, dice: random.Random) -> Struck:
    return Struck(_kill(*_worker(cluster, dice)))


def kill_all_workers(cluster: Cluster, dice: random.Random) -> Struck:
    """The state is lost with them: they go on from the newest checkpoint."""
    processes = [psutil.Process(int(member["pid"])) for member in cluster.members()]
    for process in dice.sample(processes, len(processes)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: all(map(_gone, processes)), DEATH_S, "the death of all workers")
    return Struck(f"processes {', '.join(str(process.pid) for process in processes)}")


def freeze_worker_briefly(cluster: Cluster, dice: random.Random) -> Struck:
    return _freeze(*_worker(cluster, dice), for_s=dice.uniform(0.2, 2.0))


def freeze_worker_long(cluster: Cluster, dice: random.Random) -> Struck:
    return _freeze(*_worker(cluster, dice), for_s=dice.uniform(10, 20))


def kill_reader(cluster: Cluster, dice: random.Random) -> Struck:
    return Struck(_kill(_any_of(cluster, dice, "reader"), "reader"))


def kill_reader_parent(cluster: Cluster, dice: random.Random) -> Struck:
    return Struck(_kill(_any_of(cluster, dice, "reader parent"), "parent of readers"))


def kill_coordinator(cluster: Cluster, dice: random.Random) -> Struck:
    return Struck(_kill(cluster.one("coordinator"), "coordinator"))


def freeze_coordinator(cluster: Cluster, dice: random.Random) -> Struck:
    return _freeze(cluster.one("coordinator"), "coordinator", dice.choice([3.0, 20.0]))


def freeze_lead(cluster: Cluster, dice: random.Random) -> Struck:
    return _freeze(cluster.lead, "leading process", dice.choice([3.0, 15.0]))


def freeze_agent(cluster: Cluster, dice: random.Random) -> Struck:
    return _freeze(cluster.agent, "agent of host 2", dice.choice([3.0, 15.0]))


def freeze_host(cluster: Cluster, dice: random.Random) -> Struck:
    """All processes of host 2 stop, as those of a virtual machine that is moved."""
    agent, for_s = cluster.agent, dice.choice([2.0, 15.0])
    frozen = [agent, *agent.children(recursive=True)]
    for process in frozen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()

    def wake() -> None:
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    return Struck(f"{len(frozen)} processes of host 2, for {for_s:.0f} s", for_s, wake)


def kill_agent(cluster: Cluster, dice: random.Random) -> Struck:
    done = _kill(cluster.agent, "agent of host 2")
    cluster.wait_for_host2s_end()
    time.sleep(dice.choice([0.0, 3.0, 12.0]))
    cluster.start_host2()
    return Struck(f"{done}; started again")


def kill_zygote(cluster: Cluster, dice: random.Random) -> Struck:
    """Of host 2: the agent has nothing to start workers with, and ends."""
    done = _kill(cluster.one("zygote", of=cluster.agent), "zygote of host 2")
    status = cluster.wait_for_host2s_end()
    cluster.start_host2()
    return Struck(f"{done}; the agent ended with {status}, and was started again")


# --- the leading process: after each of these, users resume -----------------------------------------------------------


def _resume(cluster: Cluster, dice: random.Random, done: str, stopped: bool = True) -> Struck:
    """`stopped`: the run has ended in order, and with it the agent of host 2; a killed one is waited for."""
    cluster.wait_for_the_leads_end()
    if stopped:
        cluster.wait_for_host2s_end()
    detached = dice.random() < 0.3
    cluster.resume(detached)
    if stopped:
        cluster.start_host2()
    return Struck(f"{done}; resumed{', detached' if detached else ''}")


def kill_lead(cluster: Cluster, dice: random.Random) -> Struck:
    return _resume(cluster, dice, _kill(cluster.lead, "leading process"), stopped=False)


def end_lead(cluster: Cluster, dice: random.Random) -> Struck:
    cluster.lead.send_signal(signal.SIGTERM)
    return _resume(cluster, dice, f"SIGTERM to process {cluster.lead.pid}")


def drop_terminal(cluster: Cluster, dice: random.Random) -> Struck:
    if not cluster.drop_terminal():
        cluster.lead.send_signal(signal.SIGHUP)
        return _resume(cluster, dice, f"SIGHUP to process {cluster.lead.pid}, which was detached")
    return _resume(cluster, dice, f"the terminal of process {cluster.lead.pid}")


def stop_command(cluster: Cluster, dice: random.Random) -> Struck:
    cluster.call("stop", cluster.run_dir)
    return _resume(cluster, dice, "distbelief stop")


# --- network, disk, clock ---------------------------------------------------------------------------------------------


def _cut(cluster: Cluster, for_s: float) -> Struck:
    cluster.lab.cut(2)
    return Struck(f"host 2, for {for_s:.1f} s", for_s, lambda: cluster.lab.mend(2))


def cut_network_briefly(cluster: Cluster, dice: random.Random) -> Struck:
    return _cut(cluster, dice.uniform(0.5, 4))


def cut_network_long(cluster: Cluster, dice: random.Random) -> Struck:
    return _cut(cluster, dice.uniform(15, 30))


def impair_network(cluster: Cluster, dice: random.Random) -> Struck:
    how = dice.choice(["delay 20ms 10ms", "delay 5ms 2ms loss 2%", "rate 20mbit"])
    cluster.lab.impair(2, *how.split())
    return Struck(f"host 2: {how}, for 10 s", 10.0, lambda: cluster.lab.repair(2))


def fill_disk(cluster: Cluster, dice: random.Random) -> Struck:
    for_s = dice.choice([3.0, 25.0])
    filled = cluster.disk.fill()
    return Struck(f"{filled >> 20} MiB, for {for_s:.0f} s", for_s, cluster.disk.free)


def set_clock(cluster: Cluster, dice: random.Random) -> Struck:
    assert cluster.clock is not None
    cluster.clock.set(dice.uniform(-40, 40) * HOUR_S)
    return Struck(f"{cluster.clock.ahead_s / HOUR_S:+.1f} h off")


# --- what users do ----------------------------------------------------------------------------------------------------


def scale(cluster: Cluster, dice: random.Random) -> Struck:
    """Down or up, and back. From 5 workers first to 2: the room of host 2 is filled before that of host 1."""
    wishes = dice.choice([(WANTED - 2,), (WANTED - 1,), (WANTED + 1, WANTED - 2)])
    for wanted in (*wishes, WANTED):
        cluster.call("scale", cluster.run_dir, wanted)
        until(lambda: len(cluster.members()) == wanted, 2 * ENDING_S, f"a generation of {wanted} members")  # noqa: B023
    return Struck(f"to {' and '.join(map(str, wishes))}, and back to {WANTED}")


def leave_worker(cluster: Cluster, dice: random.Random) -> Struck:
    process, what = _worker(cluster, dice)
    process.send_signal(signal.SIGTERM)
    until(lambda: _gone(process), ENDING_S, f"the leave of {what}")
    cluster.call("scale", cluster.run_dir, WANTED)
    return Struck(f"SIGTERM to {what}; another one was asked for")


def join_worker(cluster: Cluster, dice: random.Random) -> Struck:
    """Started by hand on host 1; it takes part, and leaves after Ctrl-C."""
    before = {int(member["pid"]) for member in cluster.members()}
    command = cluster.start(1, "worker", "--join", cluster.run_dir, prefix=("env", "--default-signal=INT"))
    try:
        until(lambda: {int(m["pid"]) for m in cluster.members()} - before, 3 * ENDING_S, "the join of a worker")
    finally:
        command.send_signal(signal.SIGINT)
        try:
            command.wait(ENDING_S)
        except Exception:
            command.kill()
            command.wait()
            raise Broken("the worker that was started by hand did not leave") from None
    cluster.call("scale", cluster.run_dir, WANTED)
    return Struck(f"process {command.pid} joined, and left with {command.returncode}")


def leave_host(cluster: Cluster, dice: random.Random) -> Struck:
    cluster.agent.send_signal(dice.choice([signal.SIGTERM, signal.SIGHUP]))
    status = cluster.wait_for_host2s_end()
    cluster.start_host2()
    return Struck(f"host 2 left with {status}, and came again")


def kill_view(cluster: Cluster, dice: random.Random) -> Struck:
    views = [cluster.start(1, "attach", cluster.run_dir) for _ in range(2)]
    time.sleep(5.0)
    ended = [view.poll() for view in views]
    for view in views:
        view.kill()
        view.wait()
    if ended != [None, None]:
        raise Broken(f"views ended by themselves: {ended}")
    return Struck("two views, killed after 5 s")


def save_and_kill(cluster: Cluster, dice: random.Random) -> Struck:
    """A worker dies while a checkpoint that was asked for is saved."""
    command = cluster.start(1, "checkpoint", cluster.run_dir)
    time.sleep(dice.uniform(0.3, 1.2))
    done = _kill(*_worker(cluster, dice))
    try:
        status = command.wait(ENDING_S)
    except Exception:
        command.kill()
        command.wait()
        raise Broken("distbelief checkpoint did not return") from None
    return Struck(f"{done}; distbelief checkpoint returned {status}")


KINDS: dict[str, Strike] = {
    "kill worker": kill_worker,
    "kill all workers": kill_all_workers,
    "freeze worker, briefly": freeze_worker_briefly,
    "freeze worker, long": freeze_worker_long,
    "kill reader": kill_reader,
    "kill reader parent": kill_reader_parent,
    "kill coordinator": kill_coordinator,
    "freeze coordinator": freeze_coordinator,
    "freeze lead": freeze_lead,
    "kill lead, resume": kill_lead,
    "SIGTERM to lead, resume": end_lead,
    "drop terminal, resume": drop_terminal,
    "stop, resume": stop_command,
    "freeze agent": freeze_agent,
    "freeze host": freeze_host,
    "kill agent": kill_agent,
    "kill zygote": kill_zygote,
    "host leaves": leave_host,
    "cut network, briefly": cut_network_briefly,
    "cut network, long": cut_network_long,
    "bad cable": impair_network,
    "fill disk": fill_disk,
    "set clock": set_clock,
    "scale": scale,
    "worker leaves": leave_worker,
    "worker joins": join_worker,
    "kill view": kill_view,
    "kill worker in a save": save_and_kill,
}

ALONE = (
    "kill lead, resume", "SIGTERM to lead, resume", "drop terminal, resume", "stop, resume",
    "freeze lead", "fill disk", "scale", "worker leaves", "worker joins", "host leaves", "kill zygote",
    "cut network, long", "freeze host", "kill worker in a save",
)  # fmt: skip
"""Kinds that ask the run for something, and wait for it: another fault would make that fail by right."""
