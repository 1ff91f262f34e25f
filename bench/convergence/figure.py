"""The figure of bench.convergence: two rows (undisturbed, one worker slowed), two columns (samples, seconds)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which people who see fewer colours can tell apart.
COLOURS = {
    "allreduce": "#000000", "ps:sync": "#0072B2", "ps:sync, no balancing": "#56B4E9", "ps:ssp": "#009E73",
    "ps:async": "#D55E00", "local_sgd": "#CC79A7", "sandblaster": "#E69F00",
}  # fmt: skip
DASHED = ("ps:sync, no balancing",)


def draw(content: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("matplotlib is not installed: .venv/bin/pip install -e .[bench]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    figure, axes = pyplot.subplots(2, 2, figsize=(10.5, 7.2), sharey=True, layout="constrained")
    slowed_by = content["slowed_by"]
    titles = {"undisturbed": "undisturbed", "slowed": f"one of {content['workers']} workers slowed {slowed_by:g}×"}
    for row, (kind, title) in enumerate(titles.items()):
        for column, unit in enumerate(("samples", "seconds")):
            axis = axes[row][column]
            for name, runs in content["runs"].items():
                points = [point for point in runs[kind]["curve"] if point[unit] > 0]
                style = "--" if name in DASHED else "-"
                axis.plot(
                    [point[unit] for point in points], [point["loss"] for point in points], style,
                    color=COLOURS[name], label=name, linewidth=1.6, marker="o", markersize=2.5,
                )  # fmt: skip
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlabel("samples seen" if unit == "samples" else "seconds since the first step")
            axis.set_title(title, fontsize=10, loc="left")
            axis.grid(True, which="both", color="#e5e5e5", linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            axis.xaxis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
            )
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes[row][0].set_ylabel("loss on test images")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
