"""The errors that people see. Each carries one clear message; the command line prints it and exits non-zero."""

from __future__ import annotations


class DistBeliefError(Exception):
    """Something the user can act on. `hint` says what to do next; `details` is a traceback or a longer text."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details


class JobError(DistBeliefError):
    """The job file, its hyper-parameters or a field of the job is wrong."""

    exit_code = 2


class RunFailed(DistBeliefError):
    """The run started and ended in failure; `details` holds the first worker's own traceback."""


class RunInterrupted(DistBeliefError):
    """Ctrl-C or SIGTERM: a clean end before the last step."""

    exit_code = 130


class NotEnoughMemory(DistBeliefError):
    """The shared segments do not fit into the memory that is free."""
