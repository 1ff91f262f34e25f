"""The small job on a system with a planted fault: partial sums are added from left to right, not along the tree."""

from small import job as right_job

from distbelief.strategies.flatmodel.rules import stepwork as takeover


def left_to_right(shards, occupied, sources):
    order = None
    for _, number in sorted(sources.items()):
        order = number if order is None else (number, order)
    return order


assert callable(takeover.program)  # otherwise the fault would be planted where nobody goes
takeover.program = left_to_right


def job(steps: int = 12):
    return right_job(steps=steps, shards=8)
