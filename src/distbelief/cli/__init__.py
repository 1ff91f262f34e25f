"""The command line. This file is the first that runs: elsewhere than on Linux the others could not even be imported."""

from __future__ import annotations

import platform

if platform.system() != "Linux":
    raise SystemExit(
        f"distbelief runs on Linux only, and this is {platform.system() or 'another system'}: it needs memfd, futexes "
        "and pidfds. On a Mac or on Windows, use a Linux container, a virtual machine or WSL 2."
    )
