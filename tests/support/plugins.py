"""Installs a small distribution into a folder for PYTHONPATH: its packages, and the metadata that names its entry
points. Nothing is built and nothing is fetched."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

PLUGINS = Path(__file__).parents[1] / "plugins"


def install(name: str, folder: Path) -> Path:
    """Install tests/plugins/NAME. Returns `folder`."""
    source = PLUGINS / name
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    shutil.copytree(source / name, folder / name)
    about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
