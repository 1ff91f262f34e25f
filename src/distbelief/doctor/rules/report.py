"""The findings of checks, and a report of them as text: OK, PROBLEM or skipped, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

Status = Literal["ok", "problem", "skipped"]


class Finding(Struct, frozen=True):
    about: str
    status: Status
    found: str
    advice: str = ""


def ok(about: str, found: str) -> Finding:
    return Finding(about, "ok", found)


def problem(about: str, found: str, advice: str) -> Finding:
    return Finding(about, "problem", found, advice)


def skipped(about: str, why: str) -> Finding:
    return Finding(about, "skipped", why)


class Host(Struct, frozen=True):
    """One machine and the findings on it."""

    name: str
    facts: dict[str, str]
    """The facts that must be equal on all hosts of a run (see compare.py)."""
    findings: list[Finding]


class Link(Struct, frozen=True):
    """A measured link from one host to another."""

    source: str
    target: str
    latency_s: float = 0.0
    """Seconds of a round trip."""
    bytes_per_s: float = 0.0
    error: str = ""
    """Why the link could not be measured."""


class Report(Struct, frozen=True):
    """All findings. Every host that took part gets the same report."""

    hosts: list[Host]
    shared: list[Finding] = []
    """Findings about the hosts together, or about this host and a run."""
    links: list[Link] = []

    @property
    def problems(self) -> list[Finding]:
        every = [finding for host in self.hosts for finding in host.findings] + list(self.shared)
        return [finding for finding in every if finding.status == "problem"]


def megabytes(size: float) -> str:
    """
    >>> megabytes(1.5e6), megabytes(32e9), megabytes(512)
    ('1.5 MB', '32 GB', '512 B')
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} B"


def duration(seconds: float) -> str:
    """
    >>> duration(0.000012), duration(0.0254), duration(5.02)
    ('0.012 ms', '25 ms', '5.0 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


# --- as text ----------------------------------------------------------------------------------------------------------


_WORDS = {"ok": "OK", "problem": "PROBLEM", "skipped": "skipped"}


def lines(report: Report) -> Iterator[str]:
    for host in report.hosts:
        yield host.name
        yield from _findings(host.findings)
    if report.shared:
        yield "between them" if len(report.hosts) > 1 else "from here"
        yield from _findings(report.shared)
        yield from map(_link, report.links)
    problems = len(report.problems)
    yield f"{problems} problem{'s' * (problems != 1)}" if problems else "all is well"


def _findings(findings: Iterable[Finding]) -> Iterator[str]:
    for one in findings:
        yield f"  {_WORDS[one.status]:<8} {one.about:<14} {one.found}"
        if one.advice:
            yield f"  {'':<8} {'what to do:':<14} {one.advice}"


def _link(link: Link) -> str:
    way = f"{link.source} → {link.target}"
    if link.error:
        return f"  {'':<8} {way:<22} not reached"
    return f"  {'':<8} {way:<22} {megabytes(link.bytes_per_s) + '/s':<12} {duration(link.latency_s)}"
