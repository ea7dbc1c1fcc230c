"""What the calls of a program cost it: measured, judged, extrapolated (``collective profile``)."""

from __future__ import annotations

from collective import trace

__all__ = ["step"]


def step() -> None:
    """Mark where a training step ends and the next begins, for ``collective profile``.

    Called once a step, always at the same point of the loop. Without it the steps are those of
    the gradients of our adapters, or a repeated pattern of calls is looked for. Does nothing
    where no trace is written.
    """
    trace.step("program")
