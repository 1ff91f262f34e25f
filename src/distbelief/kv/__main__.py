"""The supervisor process of `kv.serve`. It reads one JSON line from stdin, the `ServiceOptions`, and writes one to
stdout: the path of the connection file, or an error. The end of stdin ends the service."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

from distbelief.errors import DistBeliefError
from distbelief.kv.supervisor import ServiceOptions, Supervisor


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = json.loads(sys.stdin.readline())
    options["folder"] = Path(options["folder"])
    try:
        with (
            (options["folder"] / "service.log").open("w", buffering=1) as log,
            Supervisor(ServiceOptions(**options), lambda text: print(text, file=log)) as supervisor,
        ):
            supervisor.run(sys.stdin.fileno(), lambda path: print(json.dumps({"file": str(path)}), flush=True))
    except DistBeliefError as error:
        print(json.dumps({"error": error.message, "hint": error.hint, "details": error.details}), flush=True)
        return error.exit_code
    finally:
        shutil.rmtree(options["folder"], ignore_errors=True)  # the process that made the folder may have been killed
    return 0


if __name__ == "__main__":
    sys.exit(main())
