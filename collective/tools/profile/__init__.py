"""The cost of a program's calls: measured, judged, extrapolated (``collective profile``)."""

from __future__ import annotations

from collective.inner import trace

__all__ = ["step"]


def step() -> None:
    """Mark where a training step ends and the next begins, for ``collective profile``.

    Call it once in each step, always at the same point of the loop. Without such marks, the steps
    are those of the gradients of our adapters, those of torch's optimizers, or the repetitions of a
    loop of calls. The function has no effect if no trace is written.
    """
    trace.step("program")
