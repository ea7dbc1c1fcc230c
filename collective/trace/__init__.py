"""Traces of what ranks do when, and what programs mark in them."""

from .tracer import (
    FIRST_LANE,
    Interval,
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
    "FIRST_LANE", "Interval", "Tracer", "current", "interval", "now", "opened", "set_current",
    "span", "step",
]  # fmt: skip
