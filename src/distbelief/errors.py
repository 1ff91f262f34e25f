"""The errors that users see. Each has one clear message; the command line prints it and exits with an error status."""

from __future__ import annotations

import traceback


class DistBeliefError(Exception):
    """An error that the user can act on. `hint` says what to do next; `details` is a traceback or a longer text."""

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
    """Ctrl-C or SIGTERM: the run ended cleanly before the last step."""

    exit_code = 130


class NotEnoughMemory(DistBeliefError):
    """The shared segments do not fit into the memory that is free."""


class GradientsDiffer(DistBeliefError):
    """Two members computed different gradients for one shard. Raised on every member before the step is applied."""

    def __init__(self, message: str, hint: str, step: int, shard: int) -> None:
        super().__init__(message, hint=hint)
        self.step = step
        self.shard = shard


class NonFiniteLoss(DistBeliefError):
    """The loss is NaN or infinite. Raised on every member before the step is applied."""

    def __init__(self, value: float, step: int, shard: int) -> None:
        super().__init__(
            f"the loss is {value} at step {step}, shard {shard}; the step was not applied",
            hint="`distbelief replay RUN` shows the layer and the samples; clip_norm or a lower learning rate may help",
        )
        self.step = step
        self.shard = shard


class StepCodeError(DistBeliefError):
    """A function of the job failed in a step, outside of all shards: `schedule`, or a function of `after_update`."""

    def __init__(self, what: str, step: int, error: Exception | None = None) -> None:
        """`what`: the function and what it did. `error`: what the function raised."""
        told, details = f"{what} at step {step}", ""
        if error is not None:
            told += f": {type(error).__name__}: {error}"
            details = "".join(traceback.format_exception(error))
        hint = "the traceback shows where in the job's code it happened" if details else ""
        super().__init__(told, hint=hint, details=details)
        self.step = step
