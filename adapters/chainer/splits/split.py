"""``Split``: a link computed in pieces."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import chainer

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, UnsupportedError
from collective.training.splits.cuts import Cuts
from collective.training.splits.report import MemoryReport, Verification

from .cut import Cut, intercepting
from .executors import VariableExchanges, VariablesInTurn, VariablesOverRanks
from .filters import LinkFilters
from .session import Session

if TYPE_CHECKING:
    from .kept import Kept

__all__ = ["Split"]


class Split(chainer.Chain):  # type: ignore[misc, unused-ignore]
    """A link that computes the same in pieces: in turn on one device, or over ranks.

    ::

        model = Split(UNet(), data=(8,))              # eight stripes, one after another
        model = Split(UNet(), data=(2,), comm=comm)   # one half on each of two ranks

    As :class:`collective.adapters.torch.splits.Split`, with Chainer's functions: the link's own
    forward is run, unmodified, with a variable that stands for the cut one. Recomputing is
    ``chainer.functions.forget``, which has no derivatives of higher order. Dropout masks are drawn
    whole from NumPy's or CuPy's random numbers, as Chainer draws them, and cut; over ranks all
    ranks draw from one generator, whose seed rank 0 takes from NumPy's.

    Collective: over ranks, making it, calling it and the backward pass are; all ranks have the same
    link, weights and settings, and pass the same input, or their pieces of one.

    Args:
        link: takes ``(batch, channels, ...)`` as first argument; that one is cut.
        batch, channels, data, comm, recompute, halo, inputs, outputs, strict: as there.
        filters: as there; with ``"own"`` serializing is collective, for saving and for loading, and
            what is written and read are whole arrays. An optimizer's own state is of this rank's
            filters. A link whose forward reads ``.array`` of another link's parameter sees a piece.

    Attributes:
        joined: of the last call, the functions that took whole variables.

    Raises:
        InvalidArgumentError: the numbers are not positive integers, the pieces are not as many as
            the ranks, or another option is none of its values; or a layer that is to be cut has no
            weights yet.
        UnsupportedError: the link contains a Split, or a weight that is to be cut belongs to two
            layers.
    """

    def __init__(
        self,
        link: chainer.Link,
        *,
        batch: int = 1,
        channels: int = 1,
        data: Sequence[int] = (1,),
        comm: Communicator | None = None,
        recompute: bool = True,
        halo: str = "layer",
        inputs: str = "whole",
        outputs: str = "whole",
        filters: str = "all",
        strict: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(link, chainer.Link):
            raise InvalidArgumentError(f"Split: {type(link).__name__}; a chainer.Link.")
        for path, child in link.namedlinks():
            if isinstance(child, Split):
                raise UnsupportedError(
                    f"Split: {path} is a Split, which cannot be split. Split one link, with all "
                    "axes in one call."
                )
        self._cuts = Cuts(
            batch, channels, data, comm, recompute=recompute, halo=halo, inputs=inputs,
            outputs=outputs, filters=filters,
        )  # fmt: skip
        with self.init_scope():
            self.link = link
        self._strict = strict
        self._filters = self.filters_of(link)
        self.joined: tuple[str, ...] = ()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the link returns.

        Raises:
            InvalidArgumentError: ``x`` is no array or variable of two dimensions or more.
            ShapeError: it has fewer data axes than are cut.
            UnsupportedError: with ``strict``, a function needs its input whole.
        """
        if isinstance(x, Cut) or getattr(x, "ndim", 0) < 2:
            given = "a variable of another Split" if isinstance(x, Cut) else type(x).__name__
            raise InvalidArgumentError(
                f"Split: {given} as input; a variable or an array (batch, channels, ...)."
            )
        x = chainer.as_variable(x)
        found, self.joined, _ = self.computed(self.link, x, args, kwargs, filters=self._filters)
        return found

    def computed(
        self,
        link: chainer.Link,
        x: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        ends: str | None = None,
        kept: Kept | None = None,
        filters: LinkFilters | None = None,
    ) -> tuple[Any, tuple[str, ...], list[Any]]:
        """Compute a link in this one's pieces.

        Args:
            link: this one's, or a copy of it.
            x: a variable.
            args, kwargs: as of ``forward``.
            ends: what inputs and outputs are; None: what this one's are.
            kept: counts what is kept by pieces that are computed again.
            filters: which of the link's parameters this rank has a piece of.

        Returns:
            What the link returns, the functions that took whole variables, and the masks drawn.
        """
        executor = self._cuts.executor(
            partial(VariablesInTurn, x.xp), partial(VariablesOverRanks, x.xp),
            VariableExchanges(kept), x.ndim - 2, list(link.params()), ends, filters,
        )  # fmt: skip
        session = Session(executor, x.xp, self._strict, filters)
        running = contextlib.nullcontext() if filters is None else filters.running()
        with running, intercepting(link, session):
            found = session.leave(link(session.enter(x), *args, **kwargs))
        return found, tuple(session.joined), session.masks

    def serialize(self, serializer: Any) -> None:
        """Give or take the link's arrays, whole.

        Collective: over ranks with ``filters="own"``.
        """
        whole = contextlib.nullcontext() if self._filters is None else self._filters.whole_arrays()
        with whole:
            super().serialize(serializer)

    def filters_of(self, link: chainer.Link) -> LinkFilters | None:
        """Keep of a link's weights those of this rank's channels, if this one does so."""
        group = self._cuts.filter_group
        return None if group is None else LinkFilters(group, link)

    def whole_copy(self) -> Any:
        """Return a copy of the link with all weights.

        Collective: over ranks with ``filters="own"``.
        """
        if self._filters is None:
            return copy.deepcopy(self.link)
        return self._filters.whole_copy(self.link)

    def memory_report(self, x: Any, *args: Any, **kwargs: Any) -> MemoryReport:
        """Count what a call keeps for its backward pass, of the link and of this, by function.

        Both are run, the link whole, so that ``x`` has to be small enough for that. NumPy's random
        numbers are as before afterwards.

        Args:
            x, args, kwargs: as of ``forward``; over ranks the whole ``x``.
        """
        from .verifying import memory_report

        return memory_report(self, x, args, kwargs)

    def verify(self, x: Any, *args: Any, tolerance: float = 1e-10) -> Verification:
        """Compare with the link itself: each link's output, then all gradients, in float64.

        Parameters, their gradients and NumPy's random numbers are as before afterwards.

        Args:
            x, args: as of ``forward``; over ranks the whole ``x``, the same on all.
            tolerance: what counts as equal, relative to the largest element.
        """
        from .verifying import verify

        return verify(self, x, args, tolerance)
