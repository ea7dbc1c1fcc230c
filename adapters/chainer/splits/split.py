"""``Split``: a link computed in pieces."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import chainer

from collective import Communicator, InvalidArgumentError, UnsupportedError
from collective.adapters.chainer.state import (
    broadcast_state,
    compare_parameters,
    distinct_parameters,
    follow_root,
    persistent_values,
    same_on_all,
    sampled,
)
from collective.inner import Filters, StateEntry
from collective.training.splits import cuts, report

from .cut import Cut
from .filters import LinkFilters
from .session import VariableSession
from .variables import Variables
from .verifying import computation, memory


def state_of(link: Any, filters: Filters | None) -> list[StateEntry]:
    """Return a link's parameters and persistent values, each once.

    Args:
        link: link that is split.
        filters: record of the parameters of which this rank has a piece; None: there are none.
    """
    parameters = [
        StateEntry(
            name,
            parameter.array,
            parameter.requires_grad,
            None if filters is None else filters.piece(parameter),
        )
        for name, parameter in distinct_parameters(link)
    ]
    values = [StateEntry(p, vars(child)[name]) for p, child, name in persistent_values(link)]
    return parameters + values


_FRAMEWORK = cuts.Framework(
    Variables, VariableSession, LinkFilters, methodcaller("params"), state_of, broadcast_state,
    follow_root, root_fills=True, computation=computation, memory=memory,
)  # fmt: skip


class Split(chainer.Chain):  # type: ignore[misc, unused-ignore]
    """Link that computes its results in pieces: in turn on one device, or over ranks.

    ::

        model = Split(UNet(), data=(8,))              # eight stripes, one after another
        model = Split(UNet(), data=(2,), comm=comm)   # one half on each of two ranks

    It works as :class:`collective.adapters.torch.splits.Split`, with Chainer's functions. The
    link's own forward method runs unmodified, with a stand-in for the variable that is cut.
    Recomputation is ``chainer.functions.forget``, which has no derivatives of higher order. Dropout
    masks are drawn whole from NumPy's or CuPy's random numbers, as Chainer draws them, and then
    cut. Over ranks, all ranks draw from generators with the same seed, which rank 0 takes from
    NumPy's.

    Collective: over ranks, every rank makes the split, and calls it, the backward pass and
    :meth:`verify`. All ranks have the same link and settings. They pass the same input, or their
    pieces of one. When the split is made, rank 0's parameters and persistent values go to all
    ranks. A parameter that has no values yet takes rank 0's in the call that initialises it.
    ``verify``, and every call with ``COLLECTIVE_CHECK=always``, compare the ranks' parameters,
    persistent values and inputs bit by bit.

    Args:
        link: link that takes ``(batch, channels, ...)`` as its first argument, which is cut.
        batch, channels, data, comm, recompute, inputs, outputs, strict, broadcast: those of
            PyTorch's ``Split``.
        filters: that of PyTorch's ``Split``. With ``"own"``, serializing is collective, for saving
            and for loading, and the serialized arrays are whole. An optimizer's own state is that
            of this rank's filters. If a link's forward reads ``.array`` of another link's
            parameter, it sees a piece.

    Attributes:
        joined: names of the functions that took whole variables in the last call.

    Raises:
        InvalidArgumentError: the numbers are not positive integers, the number of pieces is not the
            number of ranks, or another option has an unknown value; or a layer that is to be cut
            has no weights yet.
        MismatchError: the ranks' settings or links differ, or, with ``broadcast=False``, their
            values; every rank raises it.
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
        inputs: str = "whole",
        outputs: str = "whole",
        filters: str = "all",
        strict: bool = False,
        broadcast: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(link, chainer.Link):
            raise InvalidArgumentError(
                f"Split: link is a {type(link).__name__} (expected a chainer.Link)."
            )
        for path, child in link.namedlinks():
            if isinstance(child, Split):
                raise UnsupportedError(
                    f"Split: {path} is a Split, which cannot be split. Split one link, with all "
                    "axes in one call."
                )
        settings = cuts.Settings(
            batch, channels, data, recompute, inputs, outputs, filters, strict, broadcast
        )
        self._cuts = cuts.Cuts(_FRAMEWORK, settings, comm)
        with self.init_scope():
            self.link = link
        self._filters = self._cuts.prepare(link)
        self.joined: tuple[str, ...] = ()
        self._comm = comm
        self._calls = 0

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the link.

        Raises:
            InvalidArgumentError: ``x`` is no array or variable of at least two dimensions.
            MismatchError: parameters differ between ranks, of which each call for training compares
                one element each; or with ``COLLECTIVE_CHECK=always``, parameters, persistent values
                or inputs differ. Every rank raises it.
            ShapeError: ``x`` has fewer data axes than are cut; or a layer gets another number of
                channels, or fewer rows, than its weights need.
            UnsupportedError: with ``strict``, a function needs its input whole.
        """
        if isinstance(x, Cut) or getattr(x, "ndim", 0) < 2:
            described = "a variable of another Split" if isinstance(x, Cut) else type(x).__name__
            raise InvalidArgumentError(
                f"Split: {described} as input (expected a variable or an array of shape (batch, "
                "channels, ...))."
            )
        x = chainer.as_variable(x)
        if self._comm is not None and chainer.config.enable_backprop:
            self._compare(self._comm)
        result, self.joined = self._cuts.computed(self.link, self._filters, x, args, kwargs)
        return result

    def _compare(self, comm: Communicator) -> None:
        """Compare the parameters of which all ranks have the whole. Collective."""
        own = self._filters
        named = [
            (n, p) for n, p in distinct_parameters(self.link) if own is None or not own.piece(p)
        ]
        note = zlib.crc32(sampled(named, self._calls))
        self._calls += 1
        if not same_on_all(note, comm):
            compare_parameters("Split", named, comm)

    def serialize(self, serializer: Any) -> None:
        """Serialize the link's arrays, each one whole.

        Collective: over ranks with ``filters="own"``.
        """
        whole = contextlib.nullcontext() if self._filters is None else self._filters.whole_arrays()
        with whole:
            super().serialize(serializer)

    def memory_report(self, x: Any, *args: Any, **kwargs: Any) -> report.MemoryReport:
        """Count the bytes that a call keeps for its backward pass, by function.

        The method runs the link both whole and split, so ``x`` has to be small enough for the whole
        link. NumPy's random numbers are restored afterwards.

        Args:
            x, args, kwargs: those of ``forward``; over ranks the whole ``x``.
        """
        return self._cuts.memory_report(self.link, self._filters, x, args, kwargs)

    def verify(self, x: Any, *args: Any, tolerance: float = 1e-10) -> report.Verification:
        """Compare with the unsplit link: each link's output, then all gradients, in float64.

        Parameters, their gradients and NumPy's random numbers are unchanged afterwards.

        Args:
            x, args: those of ``forward``; over ranks the whole ``x``, the same on all ranks.
            tolerance: largest difference that counts as equal, relative to the largest element.

        Raises:
            MismatchError: parameters, persistent values or inputs differ between ranks; every rank
                raises it.
            InvalidArgumentError: over ranks, a parameter has no values yet.
        """
        return self._cuts.verify(self.link, self._filters, x, args, tolerance)
