"""The job of small.py; but the first worker that loads it can start no more threads, as at a limit on processes."""

import os
import threading

from tests.e2e.jobs import small

REFUSE = 'def refuse(*arguments): raise RuntimeError("can\'t start new thread")'


def job(steps: int = 12):
    try:
        os.close(os.open("first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return small.job(steps)
    names = {}
    exec(compile(REFUSE, threading.__file__, "exec"), names)  # the interpreter itself has no frame of the job
    threading._start_new_thread = names["refuse"]
    return small.job(steps)
