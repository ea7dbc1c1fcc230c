"""Traces of the actions of each rank over time, and functions to mark parts of a program."""

from .tracer import (
    FIRST_LANE,
    Tracer,
    current,
    interval,
    now,
    opened,
    set_current,
    span,
    step,
)  # fmt: skip

__all__ = [
    "FIRST_LANE", "Tracer", "current", "interval", "now", "opened", "set_current",
    "span", "step",
]  # fmt: skip
