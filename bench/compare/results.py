"""The file of results: every measurement is in it as soon as it is done, so that a broken-off run can be resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Key = tuple[str, str, int, str, int]
"""(part, workload, workers, system, repetition)"""

_KEY = ("part", "workload", "workers", "system", "repetition")


class Results:
    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        self._file = file
        self.content = content

    @staticmethod
    def begin(file: Path, facts: dict[str, Any], *, resume: bool) -> Results:
        """A new file; or, to resume, the one that is there, if it was taken with the same settings."""
        empty: dict[str, Any] = {
            **facts, "measurements": [], "references": {}, "skipped": {}, "failed": {}, "others": {}, "took_s": 0.0
        }  # fmt: skip
        if resume and file.exists():
            old = json.loads(file.read_text())
            if old["settings"] == facts["settings"]:
                old["failed"], old["skipped"] = {}, {}
                return Results(file, {**old, "arguments": facts["arguments"], "resumed": True})
        return Results(file, empty)

    @staticmethod
    def read(file: Path) -> Results:
        return Results(file, json.loads(file.read_text()))

    def has(self, key: Key) -> bool:
        return any(tuple(one[name] for name in _KEY) == key for one in self.content["measurements"])

    def add(self, key: Key, measured: dict[str, Any]) -> None:
        self.content["measurements"].append({**dict(zip(_KEY, key, strict=True)), **measured})
        self.write()

    def fail(self, cell: str, system: str, reason: str) -> None:
        """In this cell; the system is not tried there again."""
        self.content["failed"].setdefault(cell, {})[system] = reason
        self.write()

    def tried_again(self, cell: str, system: str, reason: str) -> None:
        """It failed in this cell, for this reason, and is given another try."""
        self.content.setdefault("tried_again", {}).setdefault(cell, {}).setdefault(system, []).append(reason)
        self.write()

    def write(self) -> None:
        """All or nothing: whoever breaks off finds the last whole one."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(part, self._file)
