"""Whether this host could take part in a run that is going on: what its members have, against what is here. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from distbelief.control.commands import RunFacts
from distbelief.coordinator.rules.explain import fact
from distbelief.doctor.rules import clock
from distbelief.doctor.rules.clock import Exchange, skew
from distbelief.doctor.rules.finding import Finding, Host, ok, problem, skipped

_OF_THE_HOST = ("torch", "instruction_set", "MKL-DNN")
"""Facts of a member that follow from its host; others (threads, optimizer) are told to a worker by the run."""


def judge(run: RunFacts, host: Host, exchanges: Sequence[Exchange]) -> list[Finding]:
    return [
        ok("run", _about(run)),
        *_versions(run, host),
        *_device(run, host),
        clock.judge({host.name: skew(exchanges)}, "the coordinator"),
    ]


def _about(run: RunFacts) -> str:
    hosts = sorted(set(run.members.values()))
    where = f" on {', '.join(hosts)}" if hosts else ""
    many = f"{len(run.members)} worker{'s' * (len(run.members) != 1)}"
    return f"{run.strategy or 'a run'}, {run.phase}, {many}{where}, step {run.step}"


def _versions(run: RunFacts, host: Host) -> list[Finding]:
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
        return [skipped("versions", "no worker is ready yet: nobody knows what the run computes with")]
    return [ok("versions", f"as the run's: {', '.join(f'{name} {value}' for name, value in there.items())}")]


def _comparable(name: str, value: str) -> str:
    return ".".join(value.split(".")[:2]) if name == "python" else value


def _device(run: RunFacts, host: Host) -> list[Finding]:
    device = run.facts.get("device", "cpu")
    gpus = [one for one in host.findings if one.about.startswith("GPU ") and one.status == "ok"]
    if device == "cpu" or gpus:
        return []
    return [problem("device", f"the run computes on {device}, and there is none here that works", "use another host")]
