"""Layers of which each rank has only its own filters.

A layer that mixes channels can be cut in two ways. Along its outputs (*columns*), each rank
computes some channels of the result, and the gradients of the input are summed. Along its inputs
(*rows*), each rank computes what some channels of the input add to all channels, and the results
are summed. A layer that works on each channel separately is cut along both at once (*along*). These
are the column- and row-parallel layers of M. Shoeybi et al., "Megatron-LM" (2019), section 3.

Weights have to be cut before anything is computed. So the order of the layers in the model decides
how each is cut: after columns come rows, if the numbers of channels fit. If the model connects the
layers in another way, the results are the same. Channels are gathered before a layer that reads all
of them, and cut before a layer that reads some.
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

COLUMNS, ROWS, ALONG = "columns", "rows", "along"


@dataclass(frozen=True)
class FilterLayer:
    """Convolution, transposed convolution or dense layer.

    Attributes:
        name: name for messages.
        weight: parameter that holds the weights.
        bias: parameter that holds the bias, or None.
        groups: number of groups of channels; a single group reads all channels.
        transposed: whether the weight's dimensions are inputs, outputs, kernel, instead of
            outputs, inputs, kernel.
    """

    name: str
    weight: Any
    bias: Any
    groups: int
    transposed: bool

    @property
    def inputs(self) -> int:
        """Number of channels that the layer reads."""
        shape = self.weight.shape
        return int(shape[0] if self.transposed else shape[1] * self.groups)

    @property
    def outputs(self) -> int:
        """Number of channels that the layer computes."""
        shape = self.weight.shape
        return int(shape[1] * self.groups if self.transposed else shape[0])


def arrange(layers: Sequence[FilterLayer], ranks: int) -> list[str | None]:
    """Return the cut of each layer: ``COLUMNS``, ``ROWS``, ``ALONG``, or None for a whole layer.

    Layers with fewer channels than ranks, and layers with groups of several channels, stay whole.

    Args:
        layers: layers in the order of the model.
        ranks: number of ranks that share the channels.
    """
    layouts: list[str | None] = []
    cut: int | None = None  # number of channels that the previous layer leaves in pieces
    for layer in layers:
        layout, leaves = None, None
        if layer.groups == 1:
            if cut == layer.inputs:
                layout = ROWS
            elif layer.outputs >= ranks:
                layout, leaves = COLUMNS, layer.outputs
        elif layer.groups == layer.inputs == layer.outputs >= ranks:
            layout, leaves = ALONG, layer.outputs
        layouts.append(layout)
        cut = leaves
    return layouts


@dataclass(frozen=True)
class Share:
    """Piece of a parameter that a rank has.

    Attributes:
        parameter: parameter that holds this rank's piece.
        dimension: dimension along which the parameter is cut.
        counts: lengths of all ranks' pieces.
    """

    parameter: Any
    dimension: int
    counts: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        shape = list(self.parameter.shape)
        shape[self.dimension] = sum(self.counts)
        return tuple(shape)


class Filters(ABC):
    """Record of the parameters of which this rank has a piece.

    Neither the record nor a model that it has cut can be copied. A copy of the model would hold
    pieces, without a record of the parameters that they belong to.

    Args:
        group: ranks that share the channels.
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
        """Reduce the layers' parameters to this rank's pieces.

        Args:
            layers: layers in the order of the model.
            names: all names of each parameter in the model, by the parameter's ``id``.
            cut: function that reduces a parameter to some rows along a dimension.

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
        parameters = [pair for layer, layout in chosen for pair in _dimensions(layer, layout)]
        for parameter, _ in parameters:  # check all parameters before the first is cut
            known = names[id(parameter)]
            if len(known) > 1:
                raise UnsupportedError(
                    f"Split: filters='own': {' and '.join(known)} are one parameter, which two "
                    "layers would have to cut in the same way. Give each layer its own parameter, "
                    "or keep all filters on every rank with filters='all'."
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
        """Return a whole parameter, like the one of which this rank has a piece.

        Collective: every rank of the group.
        """

    def share(self, x: Any) -> Share | None:
        """Return the share that ``x`` holds; None if ``x`` is not a cut parameter."""
        return self._shares.get(id(x))

    def shares(self) -> list[Share]:
        """Return the shares of all parameters of which this rank has pieces."""
        return list(self._shares.values())

    def piece(self, x: Any) -> tuple[str, int] | None:
        """Return an identifier of this rank's piece of a parameter; None if it has all of it."""
        return None if self.share(x) is None else ("channels", self.group.rank)

    def layout(self, weight: Any, bias: Any) -> str | None:
        """Return how the layer with this weight and bias is cut; None for any other layer."""
        entry = self._layouts.get((id(weight), id(bias)))
        return None if entry is None else entry[0]

    def mine(self, share: Share) -> range:
        """Return the rows of the whole parameter that this rank has."""
        first = sum(share.counts[: self.group.rank])
        return range(first, first + share.counts[self.group.rank])

    def join(self, array: Any, share: Share) -> Any:
        """Return a whole array, of which the ranks have pieces as they have of the parameter.

        Collective: every rank of the group.
        """
        return self.group.all_gather(array, axis=share.dimension, counts=list(share.counts))

    def check_whole(self, name: str, shape: Sequence[int], share: Share) -> None:
        """Check that an array to take a piece of has the whole parameter's shape.

        Raises:
            ShapeError: the array has another shape.
        """
        if tuple(shape) != share.shape:
            raise ShapeError(
                f"Split: filters='own': {name} has shape {tuple(shape)} (expected {share.shape}, "
                f"the shape of the whole parameter) [rank {self.group.rank} of {self.group.size}]. "
                "Pass the whole parameter; every rank takes its piece of it."
            )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Mark this thread as computing the model as a split model."""
        outer = _running.filters
        _running.filters = self
        try:
            yield
        finally:
            _running.filters = outer

    def check_running(self, name: str, weight: Any) -> None:
        """Refuse to compute a layer from pieces of its weights as if they were whole.

        Raises:
            UnsupportedError: the layer was called directly, not by the split model.
        """
        if self._shares and (_running.filters is not self or self.share(weight) is None):
            raise UnsupportedError(
                f"Split: filters='own': {name} has this rank's filters alone, but it was called "
                "outside of the Split. Call the Split, or load its state into another model."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "Split: filters='own': a model of which ranks have pieces cannot be copied or pickled. "
            "Copy its state instead, which holds the whole weights."
        )


def all_names(
    parameters: Iterable[tuple[str, Any]], memory: Callable[[Any], int]
) -> dict[int, list[str]]:
    """Return, by a parameter's ``id``, its names and those of parameters in the same memory.

    Args:
        parameters: parameters by name; a parameter with several names comes under each of them.
        memory: function that returns the address of a parameter's elements.
    """
    every = list(parameters)
    alike: dict[int, list[str]] = {}
    for name, parameter in every:
        alike.setdefault(memory(parameter), []).append(name)
    return {id(parameter): alike[memory(parameter)] for _, parameter in every}


def whole_gradients(
    parameters: Iterable[tuple[str, Any]], filters: Filters | None
) -> dict[str, Any]:
    """Return the gradients of named parameters, each one whole.

    Collective: every rank of the filters' group.
    """
    gradients = {}
    for name, parameter in parameters:
        share = None if filters is None else filters.share(parameter)
        gradient = parameter.grad
        if filters is not None and share is not None and gradient is not None:
            gradient = filters.join(gradient, share)
        gradients[name] = gradient
    return gradients


def _dimensions(layer: FilterLayer, layout: str) -> list[tuple[Any, int]]:
    """Return a layer's parameters that are cut, each with the dimension of the cut."""
    outputs = int(layer.transposed)
    cuts = [(layer.weight, {COLUMNS: outputs, ROWS: 1 - outputs, ALONG: 0}[layout])]
    if layer.bias is not None and layout != ROWS:  # rows: the bias is added once, to the sum
        cuts.append((layer.bias, 0))
    return cuts


class _Active(threading.local):
    """Filters of the model that this thread computes, or None."""

    filters: Filters | None = None


_running = _Active()
