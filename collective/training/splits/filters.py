"""Layers of which each rank has its own filters alone.

A layer that mixes channels can be cut along its outputs (*columns*: each rank makes some channels
of the result, and the gradients of its input are summed) or along its inputs (*rows*: each rank
adds to all channels what some channels of the input give, and the results are summed); one that
works on each channel by itself along both at once (*along*). These are the column- and
row-parallel layers of M. Shoeybi et al., "Megatron-LM" (2019), section 3. Weights have to be cut
before anything is computed, so that which layer is cut how is read off their order in the model:
after columns come rows, if the channels fit. Where the model connects them otherwise the results
are the same: channels are gathered before a layer that reads all of them, and cut before one that
reads some.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collective.communicator import Communicator
from collective.errors import ShapeError, UnsupportedError

from .windows import pieces

__all__ = [
    "ALONG", "COLUMNS", "ROWS", "FilterLayer", "Filters", "Share", "all_names", "arrange",
    "whole_gradients",
]  # fmt: skip

COLUMNS, ROWS, ALONG = "columns", "rows", "along"


@dataclass(frozen=True)
class FilterLayer:
    """A convolution, a transposed one or a dense layer.

    Attributes:
        name: for people.
        weight: the parameter.
        bias: the parameter, or None.
        groups: of channels; one reads all.
        transposed: whether the weight's dimensions are inputs, outputs, kernel, and not outputs,
            inputs, kernel.
    """

    name: str
    weight: Any
    bias: Any
    groups: int
    transposed: bool

    @property
    def inputs(self) -> int:
        """Channels that it reads."""
        shape = self.weight.shape
        return int(shape[0] if self.transposed else shape[1] * self.groups)

    @property
    def outputs(self) -> int:
        """Channels that it makes."""
        shape = self.weight.shape
        return int(shape[1] * self.groups if self.transposed else shape[0])


def arrange(layers: Sequence[FilterLayer], ranks: int) -> list[str | None]:
    """Say how each layer is cut: ``COLUMNS``, ``ROWS``, ``ALONG``, or None, which leaves it whole.

    Whole are those with fewer channels than ranks, and groups of several channels.

    Args:
        layers: in the order of the model.
        ranks: that share the channels.
    """
    found: list[str | None] = []
    cut: int | None = None  # how many channels the layer before leaves in pieces
    for layer in layers:
        layout, leaves = None, None
        if layer.groups == 1:
            if cut == layer.inputs:
                layout = ROWS
            elif layer.outputs >= ranks:
                layout, leaves = COLUMNS, layer.outputs
        elif layer.groups == layer.inputs == layer.outputs >= ranks:
            layout, leaves = ALONG, layer.outputs
        found.append(layout)
        cut = leaves
    return found


@dataclass(frozen=True)
class Share:
    """What a rank has of a parameter.

    Attributes:
        parameter: with this rank's piece.
        dimension: along which it is a piece.
        counts: how long each rank's piece is.
    """

    parameter: Any
    dimension: int
    counts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's."""
        shape = list(self.parameter.shape)
        shape[self.dimension] = sum(self.counts)
        return tuple(shape)


class Filters(ABC):
    """Which parameters this rank has a piece of.

    It cannot be copied, and with it no model that it cut: a copy would have pieces, and nobody who
    knows of what.

    Args:
        group: the ranks that share the channels.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._shares: dict[int, Share] = {}
        self._layouts: dict[tuple[int, int], tuple[str, FilterLayer]] = {}

    def take(
        self,
        layers: Sequence[FilterLayer],
        names: Mapping[int, Sequence[str]],
        cut: Callable[[Any, int, range], None],
    ) -> list[FilterLayer]:
        """Keep of the layers' parameters this rank's pieces.

        Args:
            layers: in the order of the model.
            names: of each parameter, by its ``id``, all that the model has it under.
            cut: leaves of a parameter some rows along a dimension.

        Returns:
            The layers that are cut.

        Raises:
            UnsupportedError: a parameter that has to be cut belongs to two layers.
        """
        ranks, rank = self.group.size, self.group.rank
        chosen = [
            (layer, layout)
            for layer, layout in zip(layers, arrange(layers, ranks))
            if layout is not None
        ]
        parameters = [each for layer, layout in chosen for each in _dimensions(layer, layout)]
        for parameter, _ in parameters:  # all of them, before one is cut
            known = names[id(parameter)]
            if len(known) > 1:
                raise UnsupportedError(
                    f"Split: filters='own': {' and '.join(known)} are one parameter, which two "
                    "layers would have to cut alike. Give each its own, or keep all filters on "
                    "every rank: filters='all'."
                )
        for layer, layout in chosen:
            self._layouts[id(layer.weight), id(layer.bias)] = layout, layer
        for parameter, dimension in parameters:
            cuts = pieces(parameter.shape[dimension], ranks)
            cut(parameter, dimension, cuts[rank])
            self._shares[id(parameter)] = Share(parameter, dimension, tuple(map(len, cuts)))
        return [layer for layer, _ in chosen]

    def whole_copy(self, model: Any) -> Any:
        """Return a copy of the model with all weights.

        Collective: every rank of the group.
        """
        memo: dict[int, Any] = {id(self): type(self)(self.group)}
        for share in self.shares():
            memo[id(share.parameter)] = self.whole_parameter(share)
        return copy.deepcopy(model, memo)

    @abstractmethod
    def whole_parameter(self, share: Share) -> Any:
        """Return a parameter like the one of which this rank has a piece, with all of it.

        Collective: every rank of the group.
        """

    def share(self, x: Any) -> Share | None:
        """Return what ``x`` is a piece of; None if it is none of the parameters."""
        return self._shares.get(id(x))

    def shares(self) -> list[Share]:
        """Return what this rank has pieces of."""
        return list(self._shares.values())

    def piece(self, x: Any) -> tuple[str, int] | None:
        """Return which piece of a parameter this rank has; None if it has all of it."""
        return None if self.share(x) is None else ("channels", self.group.rank)

    def layout(self, weight: Any, bias: Any) -> str | None:
        """Return how the layer with these two is cut; None if it is none of the layers."""
        found = self._layouts.get((id(weight), id(bias)))
        return None if found is None else found[0]

    def mine(self, share: Share) -> range:
        """Return the rows of the whole parameter that this rank has."""
        first = sum(share.counts[: self.group.rank])
        return range(first, first + share.counts[self.group.rank])

    def join(self, array: Any, share: Share) -> Any:
        """Return all of an array of which the ranks have pieces, as of the parameter.

        Collective: every rank of the group.
        """
        return self.group.all_gather(array, axis=share.dimension, counts=list(share.counts))

    def check_whole(self, name: str, shape: Sequence[int], share: Share) -> None:
        """Refuse to take a piece of what has not the whole parameter's shape.

        Raises:
            ShapeError: it has another one.
        """
        if tuple(shape) != share.shape:
            raise ShapeError(
                f"Split: filters='own': {name} of shape {tuple(shape)}; {share.shape}, the whole "
                f"parameter, of which every rank takes its piece [rank {self.group.rank} of "
                f"{self.group.size}]."
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Say that this thread computes the model as a split one."""
        outer = _running.filters
        _running.filters = self
        try:
            yield
        finally:
            _running.filters = outer

    def check_running(self, name: str, weight: Any) -> None:
        """Refuse to compute a layer from pieces of its weights as if they were all.

        Raises:
            UnsupportedError: the layer was called, and not the split model.
        """
        if self._shares and (_running.filters is not self or self.share(weight) is None):
            raise UnsupportedError(
                f"Split: filters='own': {name} has this rank's filters alone, and was called by "
                "itself. Call the Split, or load the state of it into a model of its own."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "Split: filters='own': a model of which ranks have pieces cannot be copied or pickled. "
            "Copy its state, which has the whole weights."
        )


def all_names(
    parameters: Iterable[tuple[str, Any]], memory: Callable[[Any], int]
) -> dict[int, list[str]]:
    """Return by its ``id`` all names of a parameter, and of others that have the same memory.

    Args:
        parameters: by name, one with several names under each.
        memory: says where a parameter's elements are.
    """
    every = list(parameters)
    alike: dict[int, list[str]] = {}
    for name, parameter in every:
        alike.setdefault(memory(parameter), []).append(name)
    return {id(parameter): alike[memory(parameter)] for _, parameter in every}


def whole_gradients(
    parameters: Iterable[tuple[str, Any]], filters: Filters | None
) -> dict[str, Any]:
    """Return the gradients of named parameters, all of those of which ranks have pieces.

    Collective: every rank of the filters' group.
    """
    found = {}
    for name, parameter in parameters:
        share = None if filters is None else filters.share(parameter)
        gradient = parameter.grad
        if filters is not None and share is not None and gradient is not None:
            gradient = filters.join(gradient, share)
        found[name] = gradient
    return found


def _dimensions(layer: FilterLayer, layout: str) -> list[tuple[Any, int]]:
    """Return a layer's parameters that are cut, and along which dimension."""
    outputs = int(layer.transposed)
    found = [(layer.weight, {COLUMNS: outputs, ROWS: 1 - outputs, ALONG: 0}[layout])]
    if layer.bias is not None and layout != ROWS:  # which adds it once, to the sum
        found.append((layer.bias, 0))
    return found


class _Active(threading.local):
    """Whose model this thread computes."""

    filters: Filters | None = None


_running = _Active()
