"""Installs a small distribution into a folder for PYTHONPATH: its packages, and the metadata that names its entry
points. Nothing is built and nothing is fetched."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

PLUGINS = Path(__file__).parents[1] / "plugins"


def install(name: str, folder: Path) -> Path:
    """Install tests/plugins/NAME. Returns `folder`."""
    source = PLUGINS / name
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    shutil.copytree(source / name, folder / name)
    describe(folder, project["name"], project["version"], project["entry-points"])
    return folder


def describe(folder: Path, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of a distribution. `entry_points`: group -> name -> value."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
