"""Compares hosts with each other, or this host with the members of a run: versions, clocks, links. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from distbelief.control.commands import RunFacts
from distbelief.coordinator.rules.explain import fact
from distbelief.doctor.rules import clock
from distbelief.doctor.rules.clock import ClockSample, skew
from distbelief.doctor.rules.report import Finding, Host, Link, duration, megabytes, ok, problem, skipped

SLOW_BYTES_PER_S = 10e6
"""About 100 Mbit/s: a model of 100 MB would take ten seconds per step."""
FAST_BYTES_PER_S = 125e6
"""1 Gbit/s. A link above this speed is not reported, even if other links are faster."""
ODD = 10
"""A link this many times slower than the usual link between these hosts is reported."""
FAR_S = 0.05

_WHY = {
    "distbelief": "they may not understand each other; install the same version everywhere",
    "python": "a job that was pickled by one cannot be read by the other; use the same Python everywhere",
    "torch": "their results differ in the last bits; install the same torch everywhere",
    "numpy": "data that is made with it may differ; install the same numpy everywhere",
    "instruction_set": "their results differ in the last bits, and exact runs refuse them; use machines of one kind, "
    "or ATEN_CPU_CAPABILITY on the newer ones",
    "MKL-DNN": "their results differ in the last bits; set ONEDNN_MAX_CPU_ISA to the same everywhere",
    "driver": "install the same driver everywhere, so that all run the same torch",
    "CUDA": "install the same build of torch everywhere",
}


def versions(facts: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """`facts`: host -> its facts."""
    found = []
    for name, why in _WHY.items():
        values = {host: _told(name, known.get(name, "none")) for host, known in facts.items()}
        if len(set(values.values())) > 1:
            found.append(problem("versions", _odd_ones(name.replace("_", " "), values), why))
    return found or [ok("versions", f"the same on all {len(facts)} hosts")]


def _told(name: str, value: str) -> str:
    """A version as it is compared: for Python, only the minor version counts."""
    return ".".join(value.split(".")[:2]) if name == "python" else value


def _odd_ones(name: str, values: Mapping[str, str]) -> str:
    """
    >>> _odd_ones("torch", {"a": "2.13", "b": "2.12", "c": "2.13"})
    'torch: b has 2.12, the others have 2.13'
    """
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    *odd, (usual, usual_hosts) = sorted(groups.items(), key=lambda group: len(group[1]))
    told = [f"{_names(hosts)} {value}" for value, hosts in odd]
    rest = f"the others have {usual}" if len(usual_hosts) > 1 else f"{_names(usual_hosts)} {usual}"
    return f"{name}: {', '.join([*told, rest])}"


def _names(hosts: Sequence[str]) -> str:
    return f"{' and '.join(hosts)} {'has' if len(hosts) == 1 else 'have'}"


def links(measured: Sequence[Link]) -> list[Finding]:
    broken = [link for link in measured if link.error]
    good = [link for link in measured if not link.error]
    found = [
        problem(
            "links",
            f"{link.source} does not reach {link.target}: {link.error}",
            "every member connects to every other member: let the firewalls pass all ports between the hosts, and "
            "check the routes of both",
        )
        for link in broken
    ]
    found += _slow(good)
    found += [
        problem("links", _words(link), "the hosts are far apart: use hosts in one place, or local_sgd")
        for link in good
        if link.latency_s > FAR_S
    ]
    if found or not good:
        return found
    speeds, times = [link.bytes_per_s for link in good], [link.latency_s for link in good]
    text = f"{megabytes(min(speeds))}/s or more, {duration(max(times))} or less there and back, between all of them"
    return [ok("links", text)]


def _slow(good: Sequence[Link]) -> list[Finding]:
    """Reports each slow link; if all links of one host are slow, but not those of all hosts, reports that host."""
    usual = statistics.median(link.bytes_per_s for link in good) if good else 0.0
    least = max(SLOW_BYTES_PER_S, min(usual / ODD, FAST_BYTES_PER_S))
    slow = [link for link in good if link.bytes_per_s < least]
    rest = [link.bytes_per_s for link in good if link.bytes_per_s >= least]
    others = f"; the others have {megabytes(statistics.median(rest))}/s" if rest else ""
    advice = (
        "check the cable, the switch's port and its speed (ethtool), and who else uses that network; "
        "a slow network wants --strategy local_sgd:H or compression"
    )
    found = []
    for host in sorted({link.source for link in slow}):
        its = [link for link in good if host in (link.source, link.target)]
        if rest and len(its) > 2 and all(link in slow for link in its):
            speeds = [link.bytes_per_s for link in its]
            range_ = f"{megabytes(min(speeds))}/s to {megabytes(max(speeds))}/s"
            found.append(problem("links", f"every way from and to {host} is slow, {range_}{others}", advice))
            slow = [link for link in slow if link not in its]
    return found + [problem("links", _words(link) + others, advice) for link in slow]


def _words(link: Link) -> str:
    way = f"{link.source} → {link.target}"
    return f"{way}: {megabytes(link.bytes_per_s)}/s, {duration(link.latency_s)} there and back"


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Every pair of hosts once, in rounds: the pairs of a round share no host (a round-robin tournament).

    >>> rounds(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    places: list[int | None] = [*range(hosts)]
    if hosts % 2:
        places.append(None)
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in found if pairs]


# --- this host and a run ----------------------------------------------------------------------------------------------


_OF_THE_HOST = ("torch", "instruction_set", "MKL-DNN")
"""Facts that depend on a member's host. The run sets the other facts (threads, optimizer) for its workers."""


def compare_with_run(run: RunFacts, host: Host, samples: Sequence[ClockSample]) -> list[Finding]:
    return [
        ok("run", _about(run)),
        *_run_versions(run, host),
        *_device(run, host),
        clock.judge({host.name: skew(samples)}, "the coordinator"),
    ]


def _about(run: RunFacts) -> str:
    hosts = sorted(set(run.members.values()))
    where = f" on {', '.join(hosts)}" if hosts else ""
    many = f"{len(run.members)} worker{'s' * (len(run.members) != 1)}"
    return f"{run.strategy or 'a run'}, {run.phase}, {many}{where}, step {run.step}"


def _run_versions(run: RunFacts, host: Host) -> list[Finding]:
    known = {name: value for name, value in run.facts.items() if name in _OF_THE_HOST}
    software = {name: value for name, value in run.software.items() if name not in known}
    here = {name: _comparable(name, value) for name, value in host.facts.items()}
    there = {name: _comparable(name, value) for name, value in {**software, **known}.items()}
    found = []
    for name in there:
        if here.get(name) != there[name]:
            difference, fix = fact(name, here.get(name, "none"), there[name])
            found.append(problem("versions", f"this host {difference}", fix))
    if found:
        return found
    if not known:
        return [skipped("versions", "no worker is ready yet: the run's versions and processor are not known")]
    return [ok("versions", f"as the run's: {', '.join(f'{name} {value}' for name, value in there.items())}")]


def _comparable(name: str, value: str) -> str:
    return ".".join(value.split(".")[:2]) if name == "python" else value


def _device(run: RunFacts, host: Host) -> list[Finding]:
    device = run.facts.get("device", "cpu")
    gpus = [one for one in host.findings if one.about.startswith("GPU ") and one.status == "ok"]
    if device == "cpu" or gpus:
        return []
    return [problem("device", f"the run computes on {device}, and there is none here that works", "use another host")]
