"""Chainer link of which each rank has only its own filters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
import chainer.links as L

from collective import Communicator, InvalidArgumentError
from collective.training.splits.filters import FilterLayer, Filters, Share, all_names

_TRANSPOSED = L.Deconvolution2D, L.DeconvolutionND
_KINDS = L.Convolution2D, L.ConvolutionND, L.Linear, *_TRANSPOSED


class LinkFilters(Filters):
    """Filters of a Chainer link: they cut its layers, and join their arrays.

    Args:
        group: ranks that share the channels.
        link: link whose layers keep only this rank's filters; None: nothing is cut.

    Raises:
        InvalidArgumentError: a layer has no weights yet.
        UnsupportedError: a weight that has to be cut belongs to two layers.
    """

    def __init__(self, group: Communicator, link: chainer.Link | None = None) -> None:
        super().__init__(group)
        if link is None:
            return
        owners = {}
        for path, child in _in_order(link, ""):
            if isinstance(child, _KINDS):
                name = f"{path} ({type(child).__name__})"
                owners[id(child.W)] = child, _described(name, child)
        names = all_names(link.namedparams(include_uninit=False), lambda p: id(p.array))
        for cut in self.take([described for _, described in owners.values()], names, _cut):
            layer, _ = owners[id(cut.weight)]
            layer.add_hook(_Guard(self, cut.name))

    def whole_parameter(self, share: Share) -> chainer.Parameter:
        whole = chainer.Parameter(self.join(share.parameter.array, share))
        whole.name = share.parameter.name
        return whole

    @contextlib.contextmanager
    def whole_arrays(self) -> Iterator[None]:
        """Give the parameters whole arrays in the body, and cut their arrays afterwards.

        Collective: every rank of the group calls it.
        """
        own = [(share.parameter, share) for share in self.shares()]
        pieces = [parameter.array for parameter, _ in own]
        gradients = [parameter.grad for parameter, _ in own]
        wholes = [self.join(parameter.array, share) for parameter, share in own]
        try:
            for (parameter, _), whole in zip(own, wholes):
                parameter.cleargrad()
                parameter.array = whole
            yield
            pieces = [
                _piece(parameter.array, share.dimension, self.mine(share))
                for parameter, share in own
            ]
        finally:
            for (parameter, _), piece, gradient in zip(own, pieces, gradients):
                parameter.array = piece
                parameter.grad = gradient


class _Guard(chainer.LinkHook):  # type: ignore[misc, unused-ignore]
    """Hook that refuses a layer which is called outside of its Split."""

    def __init__(self, filters: LinkFilters, layer: str) -> None:
        super().__init__()
        # A link holds hooks by name, and may have been cut for another Split as well.
        self.name = f"collective-split-filters-{id(filters)}"
        self._filters = filters
        self._layer = layer

    def forward_preprocess(self, args: Any) -> None:
        self._filters.check_running(self._layer, args.link.W)


def _in_order(link: chainer.Link, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a link and all links in it, in the order of a list or of their creation.

    ``children`` is not used for the order: it sorts those of a Chain by name, and those of a
    Sequential in yet another order.
    """
    yield path or "/", link
    own = link if isinstance(link, chainer.ChainList) else vars(link).values()
    children = {id(child) for child in link.children()}
    for child in dict.fromkeys(value for value in own if id(value) in children):
        yield from _in_order(child, f"{path}/{child.name}")


def _described(name: str, link: Any) -> FilterLayer:
    if link.W.array is None:
        raise InvalidArgumentError(
            f"Split: filters='own': {name} has no weights yet. Call the link once before, or pass "
            "the number of channels that it reads."
        )
    return FilterLayer(
        name, link.W, link.b, getattr(link, "groups", 1), isinstance(link, _TRANSPOSED)
    )


def _cut(parameter: Any, dimension: int, rows: range) -> None:
    """Keep some rows in the same parameter object, which an optimizer may hold already."""
    gradient, array = parameter.grad, parameter.array
    parameter.cleargrad()
    parameter.array = _piece(array, dimension, rows)
    if gradient is not None:
        parameter.grad = _piece(gradient, dimension, rows)


def _piece(array: Any, dimension: int, rows: range) -> Any:
    return array[(*(slice(None),) * dimension, slice(rows.start, rows.stop))].copy()
