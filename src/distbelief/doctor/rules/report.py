"""A report as text: each finding with OK, PROBLEM or skipped, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distbelief.doctor.rules.finding import Finding, Link, Report, duration, megabytes

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
