"""The process behind `kv.serve`. One JSON line comes in on stdin, and its end ends the service; one goes out on stdout:
the connection file, or what went wrong."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

from distbelief.errors import DistBeliefError
from distbelief.kv.supervisor import Order, Warden


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    order["folder"] = Path(order["folder"])
    try:
        with (
            (order["folder"] / "service.log").open("w", buffering=1) as log,
            Warden(Order(**order), lambda text: print(text, file=log)) as warden,
        ):
            warden.run(sys.stdin.fileno(), lambda path: print(json.dumps({"file": str(path)}), flush=True))
    except DistBeliefError as error:
        print(json.dumps({"error": error.message, "hint": error.hint, "details": error.details}), flush=True)
        return error.exit_code
    finally:
        shutil.rmtree(order["folder"], ignore_errors=True)  # whoever made it may have been killed
    return 0


if __name__ == "__main__":
    sys.exit(main())
