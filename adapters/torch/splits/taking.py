"""Functions that make their rows of single rows: resizing, padding, slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from collective.training.splits.blocks import Read, Step, Value
from collective.training.splits.windows import Taken, Window, data_slices

from .context import Context, padded

__all__ = ["getitem", "interpolate", "pad"]

Tensor = torch.Tensor


def interpolate(
    context: Context, x: Value, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Step | None:  # fmt: skip
    """Recipe of ``interpolate``, nearest and linear of any number of axes."""
    linear = mode in ("linear", "bilinear", "trilinear")
    if antialias or not (linear or mode in ("nearest", "nearest-exact")):
        return None
    axes = len(context.shape) - 2
    scales = [None] * axes if scale_factor is None else list(
        scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * axes)  # fmt: skip
    rules, coordinates = [], []
    for n, m, scale in zip(x.lengths[1:], context.shape[2:], scales):
        # PyTorch itself says where each row comes from: of the rows' own numbers it makes them.
        ramp = torch.arange(n, dtype=torch.float64).reshape(1, 1, n)
        how = {"size": m} if scale is None else {"scale_factor": scale}
        at = functional.interpolate(
            ramp, **how, mode="linear" if linear else mode, align_corners=align_corners,
            recompute_scale_factor=recompute_scale_factor,
        ).reshape(m)  # fmt: skip
        low = at.floor().long()
        high = (low + 1).clamp(max=n - 1)
        found = [low.tolist(), high.tolist()] if linear else [low.tolist()]
        rules.append(Taken.of(*found))
        coordinates.append((low, high, at - low))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        y = arrays[0]
        for axis, ((low, high, share), rows, out) in enumerate(
            zip(coordinates, read.rows[1:], read.out[1:]), start=2
        ):
            cut = slice(out.start, out.stop)
            at = (low[cut] - rows.start).to(y.device)
            taken = y.index_select(axis, at)
            if linear:
                next_ = y.index_select(axis, (high[cut] - rows.start).to(y.device))
                weight = share[cut].to(y).reshape(-1, *(1 for _ in range(y.dim() - axis - 1)))
                taken = taken * (1 - weight) + next_ * weight
            y = taken
        return y

    return context.by_channel(rules, run)


def pad(
    context: Context,
    x: Value,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Step | None:
    """Recipe of ``pad`` in all its modes, of the data axes."""
    axes = len(context.shape) - 2
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    if any(any(pair) for pair in pairs[axes:]):
        return None
    ends = [*reversed(pairs[:axes])]
    ends = [(0, 0)] * (axes - len(ends)) + ends
    if mode == "constant":
        windows = [Window(1, 1, *each) for each in ends]

        def run(arrays: Sequence[Any], read: Read) -> Any:
            return padded(arrays[0], read.padding, value or 0.0)

        return context.by_channel(windows, run)
    maps = []
    for n, (before, after) in zip(x.lengths[1:], ends):
        ramp = torch.arange(n, dtype=torch.float64).reshape(1, 1, n)
        maps.append(functional.pad(ramp, (before, after), mode=mode).reshape(-1).long())
    return _taken(context, maps)


def _taken(context: Context, maps: Sequence[Tensor]) -> Step:
    """Make the step that takes the rows ``maps`` along the data axes."""
    rules = [Taken.of(numbers.tolist()) for numbers in maps]

    def run(arrays: Sequence[Any], read: Read) -> Any:
        y = arrays[0]
        for axis, (numbers, rows, out) in enumerate(
            zip(maps, read.rows[1:], read.out[1:]), start=2
        ):
            y = y.index_select(axis, (numbers[out.start : out.stop] - rows.start).to(y.device))
        return y

    return context.by_channel(rules, run)


def getitem(context: Context, x: Value, index: Any) -> Step | None:
    """Recipe of slices of the data axes, with the batch and the channels whole."""
    slices = data_slices(index if isinstance(index, tuple) else (index,), len(x.lengths) + 1)
    if slices is None:
        return None
    maps = [torch.arange(n)[each] for n, each in zip(x.lengths[1:], slices)]
    return _taken(context, maps)
