"""A place given by TF_CONFIG, TensorFlow's description of a cluster: who is where, and which of them this is.

The chief leads, or worker 0 where there is no chief, and is a worker besides, as in TensorFlow; tasks of type `ps` are
for parameter servers. Tasks with the same host in their address are on one host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules.place import Place, is_number

_KINDS = ("chief", "worker", "ps")
_OLD_CHIEF = "master"  # what TensorFlow 1 called it


def place(environment: Mapping[str, str]) -> Place | None:
    """None: an evaluator, for which there is nothing to do, since evaluation is a part of the run.

    >>> cluster = '"cluster": {"worker": ["a:2222", "b:2222"], "ps": ["b:2223"]}'
    >>> found = place({"TF_CONFIG": '{%s, "task": {"type": "worker", "index": 1}}' % cluster})
    >>> found.meeting, found.index, found.local_count, found.workers_here, found.servers_here
    ('a:2222', 1, 2, 1, 1)
    """
    description = _parsed(environment.get("TF_CONFIG"))
    tasks = _tasks(description)
    kind, index = _own(description)
    if kind == "evaluator":
        return None
    if (kind, index) not in tasks:
        raise _wrong(f"it says that this is {kind} {index}, but there is none in its cluster")
    order = list(tasks)
    here = [task for task in order if _host(tasks[task]) == _host(tasks[kind, index])]
    return Place(
        "tf_config",
        json.dumps(description["cluster"], sort_keys=True),
        order.index((kind, index)),
        len(order),
        here.index((kind, index)),
        len(here),
        host=_host(tasks[kind, index]),
        peers=tuple(dict.fromkeys(_host(address) for address in tasks.values())),
        meeting=tasks[order[0]],
        workers=sum(kind != "ps" for kind, _ in order),
        workers_here=sum(kind != "ps" for kind, _ in here),
        servers_here=sum(kind == "ps" for kind, _ in here),
        servers=sum(kind == "ps" for kind, _ in order),
    )


def _parsed(text: str | None) -> dict[str, Any]:
    if text is None:
        raise DistBeliefError(
            "--on tf_config, but the variable TF_CONFIG is not set",
            hint='it looks like {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}',
        )
    try:
        description = json.loads(text)
    except ValueError as error:
        raise _wrong(f"it is no JSON: {error}") from None
    if not isinstance(description, dict) or not isinstance(description.get("cluster"), dict):
        raise _wrong("there is no cluster in it")
    return description


def _tasks(description: dict[str, Any]) -> dict[tuple[str, int], str]:
    """(type, index) -> HOST:PORT, of all that take part; the one that leads is the first."""
    cluster = {_KINDS[0] if kind == _OLD_CHIEF else kind: found for kind, found in description["cluster"].items()}
    unknown = sorted(set(cluster) - {*_KINDS, "evaluator"})
    if unknown:
        raise _wrong(f"it has tasks of type {unknown[0]!r}; known are chief, worker, ps and evaluator")
    tasks: dict[tuple[str, int], str] = {}
    for kind in _KINDS:
        found = cluster.get(kind, [])
        addresses = dict(enumerate(found)) if isinstance(found, list) else found
        if not isinstance(addresses, dict) or not all(_is_address(address) for address in addresses.values()):
            raise _wrong(f"the {kind} tasks are no list of addresses such as host:2222")
        if not all(is_number(str(number)) for number in addresses):
            raise _wrong(f"the {kind} tasks are not numbered")
        tasks |= {(kind, int(number)): addresses[number] for number in sorted(addresses, key=int)}
    if not any(kind != "ps" for kind, _ in tasks):
        raise _wrong("it has no chief and no worker")
    if sum(kind == "chief" for kind, _ in tasks) > 1:
        raise _wrong("it has more than one chief")
    twice = [address for address in tasks.values() if list(tasks.values()).count(address) > 1]
    if twice:
        raise _wrong(f"two tasks have the address {twice[0]}")
    return tasks


def _own(description: dict[str, Any]) -> tuple[str, int]:
    task = description.get("task")
    kind, index = (task.get("type"), task.get("index", 0)) if isinstance(task, dict) else (None, None)
    if not isinstance(kind, str) or not is_number(str(index)):
        raise _wrong("it does not say which task this is (type and index)")
    return (_KINDS[0] if kind == _OLD_CHIEF else kind), int(str(index))


def _is_address(text: object) -> bool:
    if not isinstance(text, str):
        return False
    host, _, port = text.rpartition(":")
    return bool(host) and is_number(port) and 0 < int(port) < 1 << 16


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _wrong(what: str) -> DistBeliefError:
    return DistBeliefError(
        f"TF_CONFIG cannot be used: {what}",
        hint='it looks like {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}',
    )
