"""The live view on a terminal: progress, loss, metrics, speed, and each worker's use of time.

The view has no thread: the engine's loop calls `refresh`. `render` is a pure function of the progress, so tests and
other programs can draw it into any console.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from distbelief.observe import text
from distbelief.observe.records import Follower, Progress, WorkerLoad

COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_red")
TIME_COLOURS = {"data": "yellow", "compute": "green", "comm": "magenta"}
TIME_MARKS = {"data": "░", "compute": "█", "comm": "▒"}  # told apart without colour too
BAR_WIDTH = 12
PLACES = " · "
"""Separates the parts of a member's place."""
MOST_WITH_BAR = 2
"""With more parts in a place, 80 columns have no room for bars."""
OTHER_LINES = 9
"""Lines of the view besides the workers' rows."""


class TerminalView:
    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, *, elapsed_s: float = 0.0
    ) -> None:
        """`elapsed_s`: how long the run has been going on."""
        self._console = console
        self._clock = clock
        self._begin = clock() - elapsed_s
        self._live: Live | None = None
        self._follower: Follower | None = None
        self._run_dir = Path()
        self._workers = 0

    def started(self, run_dir: Path, workers: int) -> None:
        self._run_dir, self._workers = run_dir, workers
        self._follower = Follower(run_dir)
        self._follower.catch_up()  # of a resumed run, only new notices are printed
        self._live = Live(self._frame(), console=self._console, auto_refresh=False)
        self._live.start()

    def log(self, source: str, line: str) -> None:
        if self._follower is not None:
            self._follower.logged(source, line)
        prefix = Text(f"{source} │ ", style=source_colour(source))
        self._console.print(prefix + Text.from_ansi(text.last_line(line)), soft_wrap=True)

    def refresh(self) -> None:
        if self._live is not None:
            self._show_news(self._live)

    def _show_news(self, live: Live) -> None:
        assert self._follower is not None
        for record, progress in self._follower.poll():
            if record.get("kind") in ("notice", "unreadable"):
                self._console.print(Text(progress.notice, style="bold"), soft_wrap=True)
        live.update(self._frame(), refresh=True)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        try:
            self._show_news(live)
        finally:  # the terminal is as it was, whatever the records are
            live.stop()

    def _frame(self) -> RenderableType:
        progress = self._follower.progress if self._follower is not None else Progress()
        rows = max(self._console.height - OTHER_LINES, 3)
        return render(progress, self._clock() - self._begin, self._run_dir, self._workers, rows)


def source_colour(source: str) -> str:
    """A worker keeps its colour for the whole run."""
    number = source.rpartition(" ")[2]
    return COLOURS[int(number) % len(COLOURS)] if number.isdigit() else "dim"


def render(progress: Progress, elapsed_s: float, run_dir: Path, workers: int, rows: int = 16) -> RenderableType:
    """One frame. Lists at most `rows` workers, always including the slowest."""
    parts: list[RenderableType] = [_title(progress, run_dir, workers), _bar(progress, elapsed_s), *_figures(progress)]
    if progress.workers:
        parts += [Text(), _table(progress, rows)]
    return Group(*parts)


def _title(progress: Progress, run_dir: Path, workers: int) -> Text:
    there = text.count(len(progress.workers) or workers, "worker")  # workers join and leave
    generation = f"generation {progress.generation}" if (progress.generation or 0) > 1 else ""
    facts = " · ".join(part for part in (progress.strategy, there, generation, str(run_dir)) if part)
    title = Text(no_wrap=True, overflow="ellipsis")
    return title.append(progress.name, "bold").append(f"{'  ' if progress.name else ''}{facts}", "dim")


def _bar(progress: Progress, elapsed_s: float) -> RenderableType:
    if not progress.step:
        return Text(f"starting … {text.duration(elapsed_s)}", style="dim")
    times = text.duration(elapsed_s)
    if progress.remaining_s is not None:
        times += f", {text.duration(progress.remaining_s)} left"
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True, style="dim")
    if progress.total is None:
        line.add_row(Text(f"step {progress.step}", "bold"), "", "", times)
    else:
        bar = ProgressBar(total=progress.total, completed=progress.step)
        share = text.percent(progress.step / progress.total)
        line.add_row(Text(f"step {progress.step}/{progress.total}", "bold"), bar, share, times)
    return line


def _figures(progress: Progress) -> list[RenderableType]:
    lines = []
    if progress.loss is not None:
        # Smoothed: the last batch's own loss would only flicker at several frames a second. But NaN must be visible.
        loss = progress.smoothed if math.isfinite(progress.loss) else progress.loss
        line = Text("loss ", "dim").append(text.number(loss), "bold cyan")
        if progress.samples_per_s is not None:
            line.append("   speed ", "dim").append(text.rate(progress.samples_per_s), "bold cyan")
        if progress.saved_step is not None:
            line.append("   saved at step ", "dim").append(str(progress.saved_step))
        lines.append(line)
    if progress.metrics_step is not None:
        line = Text(f"evaluation at step {progress.metrics_step}", "dim", no_wrap=True, overflow="ellipsis")
        for name, value in text.metrics(progress.metrics):
            line.append(f"   {name} ", "dim").append(text.number(value), "bold green")
        lines.append(line)
    return list(lines)


def _table(progress: Progress, rows: int) -> RenderableType:
    slowest = progress.slowest
    places = progress.workers[0].place
    table = _divided_table(places) if places else _plain_table("push/fetch" if progress.workers[0].pace else "shards")
    shown = _listed(progress, rows)
    for load in shown:
        marked = slowest is not None and load.worker == slowest.worker
        name = f"{'▶ ' if marked else ''}{load.worker}"
        row = _divided_row(load, len(table.columns)) if places else _row(load)
        table.add_row(name, *row, style="bold yellow" if marked else "")
    notes = []
    if len(shown) < len(progress.workers):
        notes.append(Text(f"… and {text.count(len(progress.workers) - len(shown), 'more worker')}", style="dim"))
    if slowest is not None:
        excess = text.percent(slowest.excess)
        notes.append(Text(f"▶ worker {slowest.worker} is the slowest: a shard takes it {excess} longer", "yellow"))
    return Group(table, *notes)


def _listed(progress: Progress, rows: int) -> list[WorkerLoad]:
    if len(progress.workers) <= rows:
        return list(progress.workers)
    worst = progress.slowest.worker if progress.slowest is not None else -1
    others = [load.worker for load in progress.workers if load.worker != worst]
    listed = {worst, *others[: rows - (worst >= 0)]}
    return [load for load in progress.workers if load.worker in listed]


def _empty_table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("worker", justify="right", no_wrap=True)
    return table


def _plain_table(what: str) -> Table:
    table = _empty_table()
    table.add_column("host", max_width=12, overflow="ellipsis")  # the column that shrinks on a narrow terminal
    table.add_column(what, no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("time", min_width=BAR_WIDTH, no_wrap=True)
    _add_shares(table)
    return table


def _add_shares(table: Table) -> None:
    for name, colour in TIME_COLOURS.items():
        table.add_column(Text(f"{TIME_MARKS[name]} {name}", colour), justify="right", no_wrap=True)


def _row(load: WorkerLoad) -> list[RenderableType]:
    shards = "spare" if load.first == load.end else str(load.first)
    if load.end - load.first > 1:
        shards = f"{load.first}–{load.end - 1}"
    return [load.host, load.pace or shards, str(load.step), _time_bar(load), *_shares(load)]


def _shares(load: WorkerLoad) -> list[RenderableType]:
    return [Text(text.percent(share), TIME_COLOURS[name]) for name, share in _times(load).items()]


def _times(load: WorkerLoad) -> dict[str, float]:
    return {"data": load.data, "compute": load.compute, "comm": load.comm}


def _time_bar(load: WorkerLoad) -> Text:
    """Three colours that fill the bar together; cumulative sums are rounded, so the widths always add up."""
    bar, done, share = Text(), 0, 0.0
    for name, part in _times(load).items():
        share += part
        width = round(share * BAR_WIDTH) - done
        bar.append(TIME_MARKS[name] * width, TIME_COLOURS[name])
        done += width
    return bar


# --- a divided model: the place matters more than the shards, and all members are at the same step ------------------


def _divided_table(place: str) -> Table:
    """The head shows what all places share: "stage · data" above "1/2 · 2/2"."""
    table = _empty_table()
    table.add_column(_place(place, 0), no_wrap=True)
    if place.count(PLACES) < MOST_WITH_BAR:
        table.add_column("time", min_width=BAR_WIDTH, no_wrap=True)
    _add_shares(table)
    table.add_column("waits for", no_wrap=True)
    return table


def _divided_row(load: WorkerLoad, columns: int) -> list[RenderableType]:
    most = [_place(load.place, 2), _time_bar(load), *_shares(load), _waits(load)]
    return most if len(most) + 1 == columns else [most[0], *most[2:]]


def _place(place: str, part: int) -> str:
    return PLACES.join(one.rpartition(" ")[part] for one in place.split(PLACES))


def _waits(load: WorkerLoad) -> str:
    """The worker that this worker mostly waits for, and the fraction of its time that it waits."""
    if load.waits_for is None or load.waiting < text.WORTH_SAYING:
        return "–"
    return f"{load.waits_for} ({text.percent(load.waiting)})"
