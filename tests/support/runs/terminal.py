"""A terminal for one command, which a test takes away: `terminal.py FILE COMMAND …`, until FILE exists.

The command is the leader of the terminal's session, as a shell would be: the kernel sends it SIGHUP. Its output goes to
stdout, and its status becomes the exit status.
"""

from __future__ import annotations

import os
import pty
import select
import sys
from pathlib import Path


def main() -> None:
    end, command = Path(sys.argv[1]), sys.argv[2:]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    while not end.exists():
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                os.write(1, os.read(terminal, 1 << 16))
            except OSError:  # the command has ended
                break
    os.close(terminal)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)


if __name__ == "__main__":
    main()
