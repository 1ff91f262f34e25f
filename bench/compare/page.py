"""docs/benchmarks.md and its figures, from a file of results. Nothing on the page is written by hand but its frame."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.compare import shown, summary
from bench.compare.plan import ACCURACY_GOAL
from bench.compare.summary import Content, Row
from bench.compare.systems import SYSTEMS
from bench.running import BENCH, ROOT
from bench.workloads import WORKLOADS

PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "docs" / "figures"
MEASURES = (
    "system",
    "samples/s",
    "over DDP",
    "of the ideal",
    "first step, s",
    "peak MB",
    "wire MB/step",
    "others' CPU",
)


def write(content: Content, file: Path, page: Path = PAGE, figures: Path = FIGURES) -> list[Path]:
    """The files that were written."""
    drawn = _draw(content, figures)
    page.parent.mkdir(parents=True, exist_ok=True)
    there = {path.stem: path for path in drawn if path.suffix == ".png"}
    page.write_text(text(content, file, {name: path.relative_to(page.parent) for name, path in there.items()}))
    return [page, *drawn]


def _draw(content: Content, folder: Path) -> list[Path]:
    try:
        from bench.compare.charts import measures, style, training
    except ImportError as error:
        raise SystemExit(f"figures need matplotlib ({error}): pip install 'distbelief[bench]'") from None
    charts: dict[str, Callable[[Content], Any | None]] = {
        "speed": training.speed, "scaling": training.scaling, "first-step": training.first_step,
        "accuracy": training.accuracy, "costs": training.costs, "recovery": measures.recovery,
        "checkpoint": measures.checkpoint, "bandwidth": measures.bandwidth,
    }  # fmt: skip
    written = []
    for name, chart in charts.items():
        figure = chart(content)
        if figure is not None:
            written += style.save(figure, folder, name)
    return written


def text(content: Content, file: Path, figures: dict[str, Path]) -> str:
    """The whole page. `figures`: name -> where it lies, seen from the page."""

    def picture(name: str, about: str) -> list[str]:
        return [f"![{about}]({figures[name].as_posix()})", ""] if name in figures else []

    lines = _head(content, file)
    lines += ["## Speed", "", *picture("speed", "Samples per second over DDP's, by workload")]
    for workload, workers in summary.cells(content, "speed"):
        lines += [f"### {WORKLOADS[workload].title}", "", *_cell(content, "speed", workload, workers)]
    lines += [*_turns(content), *_verdicts(content)]
    if summary.cells(content, "scaling"):
        lines += ["## Scaling", "", *picture("scaling", "Samples per second by number of workers")]
        lines += [
            "The batch grows with the workers. The ideal is as many processes that exchange nothing; beyond the number "
            "of cores it does not grow either.",
            "",
            *_scaling(content),
        ]
    lines += ["## Time to the first step", "", *picture("first-step", "Seconds from the command to the first step")]
    curves = summary.accuracy_curves(content)
    if curves:
        lines += [f"## Time to {ACCURACY_GOAL:.0%} on Fashion-MNIST", "", *picture("accuracy", "Accuracy over time")]
        lines += _table(("system", "seconds, by repetition", "highest"), [
            [summary.title(name), shown.accuracy_times(some), f"{max(share for _, share in some[0]):.1%}"]
            for name, some in curves.items()
        ])  # fmt: skip
    lines += [
        "## Memory, bytes, lines of code",
        "",
        *picture("costs", "Memory, bytes on the wire, lines of code"),
        *_code(),
    ]
    for part, about in (
        ("recovery", "Recovery after a kill"),
        ("checkpoint", "Checkpoints"),
        ("bandwidth", "Bandwidth"),
    ):
        if part in content["others"]:
            lines += [f"## {about}", "", *picture(part, about), *_other(part, content["others"][part])]
    return "\n".join([*lines, *_systems(content)]).rstrip() + "\n"


def _head(content: Content, file: Path) -> list[str]:
    machine = content["machine"]
    versions = {**machine["versions"], **content.get("versions", {})}
    name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else file.name
    link = f"[{name}](../{name})" if file.is_relative_to(ROOT) else name
    told = [one for one in content["measurements"] if not _has_daemons(one["system"])]
    busy = max((one["others"] for one in told), default=0.0)
    found = [
        "# Benchmarks",
        "",
        "Made by `python -m bench report` from " + link + "; not written by hand. Results where we lose stay in.",
        "",
        f"- measured: {machine['date']}, in {content['took_s'] / 60:.0f} minutes; command: `make "
        + ("bench-quick`" if content["settings"]["quick"] else "bench`")
        + f" (`python -m bench {' '.join(content['arguments'])}`)",
        f"- machine: {machine['cpu']}, {machine['cores_usable']} of {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['instruction_set']}, Linux {machine['kernel']}",
        "- versions: " + ", ".join(f"{package} {version}" for package, version in versions.items()),
        f"- load before and after: {content['load']['before']}, {content['load'].get('after', [])}; during a "
        f"measurement others had up to {busy:.0%} of the machine's processor time (Ray's own processes count as "
        "others' in its lines)",
        "- one thread per worker, torch's fused optimizers, the same first weights and batches for all; systems take "
        "turns in every repetition, and ratios are taken within one. Figures are medians (lowest – highest)",
        "- losses of whole runs were compared with those of one process on the same batches: a system with other "
        "losses is left out",
        "- bytes on the wire: what went over a loopback of our own, headers included"
        + (f" (not measured: {content['wire']})" if content.get("wire") else "; shared memory is no wire"),
        "",
    ]
    if content["settings"]["quick"]:
        found += ["**A quick look: few repetitions. `make bench` measures everything.**", ""]
    if busy > 0.3:
        found += ["**Preliminary: the machine was busy with other work while this was measured.**", ""]
    return found


def _has_daemons(system: str) -> bool:
    return system in SYSTEMS and SYSTEMS[system].has_daemons


def _cell(content: Content, part: str, workload: str, workers: int) -> list[str]:
    some = [one for one in content["measurements"] if (one["part"], one["workload"]) == (part, workload)]
    often = 1 + max(one["repetition"] for one in some)
    fewest = min(Counter(one["system"] for one in some).values())
    repetitions = f"{often}" if fewest == often else f"{fewest} to {often}"
    warm_up, timed = some[0]["warm_up"], len(some[0]["losses"]) - some[0]["warm_up"]
    rows = summary.rows(content, part, workload, workers)
    about = f"{workers} workers; {timed} timed steps after {warm_up} of warm-up; repetitions: {repetitions}."
    lines = [about, ""]
    lines += _table(MEASURES, [_row(row) for row in rows if not row.problem])
    lines += [f"- not comparable: {row.title}: {row.problem}" for row in rows if row.problem]
    return [*lines, ""]


def cause(reason: str) -> str:
    """One line of why something failed: the first error that it names.

    >>> cause("COMMAND ended with 1:\\nValueError: too small\\n…\\nnoise")
    'ValueError: too small'
    """
    lines = reason.splitlines()
    return next((line for line in lines if re.search(r"(Error|Exception)\b: ", line)), lines[0])[:200]


def _row(row: Row) -> list[str]:
    name = f"**{row.title}**" if row.is_ours else row.title
    wire = "" if row.wire_bytes_per_step is None else f"{row.wire_bytes_per_step / 1e6:.2f}"
    speed = f"{row.speed.median:,.{0 if row.speed.median >= 100 else 1}f}"
    ratios = [shown.ratio_text(row.to_ddp), shown.ratio_text(row.to_ideal)]
    return [
        name,
        speed,
        *ratios,
        f"{row.first_step_s.median:.1f}",
        f"{row.peak_bytes / 1e6:.0f}",
        wire,
        f"{row.others.high:.0%}",
    ]


def _turns(content: Content) -> list[str]:
    found = content.get("turns", {})
    if not found:
        return []
    measured = {
        name: [
            f"{len(next(iter(one['samples_per_s'].values())))} × {one['turn_s']:g} s",
            f"{one['at']} UTC" if "at" in one else "",
        ]
        for name, one in found.items()
    }
    rows = [
        [name, *map(shown.quartiles_text, ratios), *measured[name.partition(",")[0]]]
        for name, ratios in summary.turn_rows(content)
    ]
    about = (
        "Our allreduce, DDP and the ideal once more: all are there at once, and one runs while the others are "
        "stopped, in turns of seconds, so that neighbouring turns see the same machine. Ratios by round: medians "
        '(quartiles). Goals are held against these. `oneDNN`: with `Job(matmul="onednn")` ([why](matmul.md)); DDP '
        "and the ideal are as they come, and the last ratio is to DDP on a model with the same layers."
    )
    return [
        "### In turns",
        "",
        about,
        "",
        *_table(("allreduce, two workers", *shown.TURN_HEAD, "rounds", "measured"), rows),
    ]


def _verdicts(content: Content) -> list[str]:
    rows = [
        [one.what, f"{one.found:.2f}", f"{one.at_least:g}", "met" if one.met else "**not met**"]
        for one in summary.verdicts(content)
    ]
    return ["### Goals", "", *_table(("allreduce, two workers", "found", "at least", ""), rows)] if rows else []


def _scaling(content: Content) -> list[str]:
    lines = []
    for workload in dict.fromkeys(name for name, _ in summary.cells(content, "scaling")):
        found = summary.scaling(content, workload)
        counts = sorted({count for some in found.values() for count in some})
        rows = [
            [summary.title(name), *(f"{some[count].median:,.0f}" if count in some else "" for count in counts)]
            for name, some in found.items()
        ]
        lines += _table((f"{workload}, samples/s", *(f"{count} worker{'s' * (count > 1)}" for count in counts)), rows)
    return lines


def _code() -> list[str]:
    drivers = {system.driver: system for system in reversed(SYSTEMS.values())}
    rows = []
    for driver, system in drivers.items():
        file = BENCH / "drivers" / driver
        if file.exists():
            name = "**DistBelief, any strategy**" if system.kind == "ours" else system.title
            rows.append((summary.lines_of_code(file), name, f"[{driver}](../bench/drivers/{driver})"))
    table = [[name, str(lines), link] for lines, name, link in sorted(rows)]
    about = (
        "Lines of user code: what the driver of each system needs to train any of the workloads and record its steps."
    )
    return [about, "", *_table(("system", "lines", "file"), table)]


def _other(part: str, found: dict[str, Any]) -> list[str]:
    lines = [f"`{found['command'].replace('-m ', 'python -m ')}`; load before: {found['load']['before']}.", ""]
    if part == "recovery":
        rows = [
            [name, str(one["kills"]), f"{one['next_commit_s']['median']:.2f} ({one['next_commit_s']['high']:.2f})",
             f"{one['redone_steps']['median']:.0f}"]
            for name, one in found["workloads"].get("mlp", {}).items()
        ]  # fmt: skip
        lines += _table(("system", "kills", "seconds to the next step, median (highest)", "steps done again"), rows)
        lines += [f"- skipped: {name}: {reason}" for name, reason in found.get("skipped", {}).items()]
    elif part == "checkpoint":
        rows = [
            [name, *(f"{1000 * one[key]['median']:,.1f}" for key in ("stall_s", "extra_s", "write_s"))]
            for name, one in found["systems"].items()
        ]
        lines += _table(("system", "stall, ms", "in all, ms", "written after, ms"), rows)
    else:
        reduced = found.get("reduce", {}).get("gb_per_s", {})
        sums = {f"{mb} MB": {name: one["median"] for name, one in some.items()} for mb, some in reduced.items()}
        moved = {
            size: {name: statistics.median(one["gb_per_s"]) for name, one in some.items()}
            for size, some in found.get("servers", {}).items()
        }
        for about, sizes in (("sum over two processes, GB/s", sums), ("push and pull, GB/s", moved)):
            names = list(next(iter(sizes.values()), {}))
            rows = [[name, *(f"{some[name]:.2f}" for some in sizes.values())] for name in names]
            lines += _table((about, *sizes), rows)
    return [*lines, ""]


def _systems(content: Content) -> list[str]:
    measured = {one["system"] for one in content["measurements"]}
    lines = ["## Systems", ""]
    lines += [
        f"- {one.title} (`{one.name}`): {one.note}" for one in SYSTEMS.values() if one.name in measured and one.note
    ]
    failed = [(cell, name, why) for cell, some in content["failed"].items() for name, why in some.items()]
    if failed:
        lines += ["", "Failed:", ""]
        lines += [f"- {cell}: {summary.title(name)}: `{cause(why)}`" for cell, name, why in failed]
    again = [(cell, name, why) for cell, some in content.get("tried_again", {}).items() for name, why in some.items()]
    if again:
        lines += ["", "Failed and tried again:", ""]
        lines += [f"- {cell}: {summary.title(name)}, {len(why)} times: `{cause(why[0])}`" for cell, name, why in again]
    if content["skipped"]:
        lines += ["", "Skipped:", ""]
        lines += [f"- {summary.title(name)}: {reason}" for name, reason in content["skipped"].items()]
    return lines


def _table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    align = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in ([*head], align, *rows)] + [""]
