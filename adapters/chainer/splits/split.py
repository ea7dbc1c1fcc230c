"""``Split``: a link computed in pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import chainer

from collective.adapters.chainer.state import broadcast_state, follow_root
from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, UnsupportedError
from collective.training.splits.cuts import Cuts, Framework
from collective.training.splits.report import MemoryReport, Verification
from collective.training.splits.settings import Settings

from .cut import Cut
from .filters import LinkFilters
from .replicas import state_of
from .session import VariableSession
from .variables import Variables
from .verifying import memory_report, verify

__all__ = ["Split"]

_FRAMEWORK = Framework(
    Variables, VariableSession, LinkFilters, methodcaller("params"), state_of, broadcast_state,
    follow_root, root_fills=True,
)  # fmt: skip


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

    Collective: over ranks, making it, calling it, the backward pass and :meth:`verify` are. All
    ranks have the same link and settings. They pass the same input, or their pieces of one.
    Rank 0's parameters and persistent values go to all ranks when the split is made; a parameter
    that has no values yet takes rank 0's in the call that initialises it. ``verify``, and every
    call with ``COLLECTIVE_CHECK=always``, compare the ranks' parameters, persistent values and
    inputs bit by bit.

    Args:
        link: takes ``(batch, channels, ...)`` as first argument; that one is cut.
        batch, channels, data, comm, recompute, halo, inputs, outputs, strict, broadcast: as there.
        filters: as there; with ``"own"`` serializing is collective, for saving and for loading, and
            what is written and read are whole arrays. An optimizer's own state is of this rank's
            filters. A link whose forward reads ``.array`` of another link's parameter sees a piece.

    Attributes:
        joined: of the last call, the functions that took whole variables.

    Raises:
        InvalidArgumentError: the numbers are not positive integers, the pieces are not as many as
            the ranks, or another option is none of its values; or a layer that is to be cut has no
            weights yet.
        MismatchError: the ranks' settings or links differ, or with ``broadcast=False`` their
            values; on every rank.
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
        broadcast: bool = True,
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
        settings = Settings(
            batch, channels, data, recompute, halo, inputs, outputs, filters, strict, broadcast
        )
        self._cuts = Cuts(_FRAMEWORK, settings, comm)
        with self.init_scope():
            self.link = link
        self._filters = self._cuts.prepare(link)
        self.joined: tuple[str, ...] = ()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the link returns.

        Raises:
            InvalidArgumentError: ``x`` is no array or variable of two dimensions or more.
            MismatchError: with ``COLLECTIVE_CHECK=always``, parameters, persistent values or inputs
                differ between ranks; on every rank.
            ShapeError: it has fewer data axes than are cut, or a layer gets other channels, or
                fewer rows, than its weights are for.
            UnsupportedError: with ``strict``, a function needs its input whole.
        """
        if isinstance(x, Cut) or getattr(x, "ndim", 0) < 2:
            given = "a variable of another Split" if isinstance(x, Cut) else type(x).__name__
            raise InvalidArgumentError(
                f"Split: {given} as input; a variable or an array (batch, channels, ...)."
            )
        x = chainer.as_variable(x)
        found, self.joined = self._cuts.computed(self.link, self._filters, x, args, kwargs)
        return found

    def serialize(self, serializer: Any) -> None:
        """Give or take the link's arrays, whole.

        Collective: over ranks with ``filters="own"``.
        """
        whole = contextlib.nullcontext() if self._filters is None else self._filters.whole_arrays()
        with whole:
            super().serialize(serializer)

    def memory_report(self, x: Any, *args: Any, **kwargs: Any) -> MemoryReport:
        """Count what a call keeps for its backward pass, of the link and of this, by function.

        Both are run, the link whole, so that ``x`` has to be small enough for that. NumPy's random
        numbers are as before afterwards.

        Args:
            x, args, kwargs: as of ``forward``; over ranks the whole ``x``.
        """
        return memory_report(self._cuts.copies(self.link, self._filters), x, args, kwargs)

    def verify(self, x: Any, *args: Any, tolerance: float = 1e-10) -> Verification:
        """Compare with the link itself: each link's output, then all gradients, in float64.

        Parameters, their gradients and NumPy's random numbers are as before afterwards.

        Args:
            x, args: as of ``forward``; over ranks the whole ``x``, the same on all.
            tolerance: what counts as equal, relative to the largest element.

        Raises:
            MismatchError: parameters, persistent values or inputs differ between ranks; on every
                rank.
            InvalidArgumentError: over ranks, a parameter has no values yet.
        """
        self._cuts.check_replicas(self.link, self._filters)
        self._cuts.check_inputs(x, args, {}, ends="whole")
        return verify(self._cuts.copies(self.link, self._filters), x, args, tolerance)
