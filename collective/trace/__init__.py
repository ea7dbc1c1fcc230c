"""Traces of the actions of each rank over time, and functions to mark parts of a program."""

from .tracer import (
    FIRST_LANE,
    Tracer,
    current,
    now,
    open_file,
    opened,
    set_current,
    span,
    step,
)  # fmt: skip

__all__ = [
    "FIRST_LANE", "Tracer", "current", "now", "open_file", "opened", "set_current",
    "span", "step",
]  # fmt: skip
