"""``Split``: a module that computes its results in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from collective import Communicator, InvalidArgumentError, UnsupportedError
from collective.adapters.torch.synchronous import broadcast_tensors
from collective.adapters.torch.wrapped import Snapshot, announce
from collective.inner import Filters, StateEntry
from collective.training.splits import cuts, report, session

from .filters import ModuleFilters
from .session import Cut, TensorSession
from .tensors import Tensors
from .verifying import computation, memory


def state_of(module: nn.Module, filters: Filters | None = None) -> list[StateEntry]:
    """Return a module's parameters and buffers, each once, including those that are not saved.

    Args:
        module: module that is split.
        filters: record of the parameters of which this rank has a piece; None: there are none.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [
        StateEntry(
            name,
            None if nn.parameter.is_lazy(tensor) else tensor.detach(),
            tensor.requires_grad,
            None if filters is None else filters.piece(tensor),
        )
        for name, tensor in tensors
    ]


def give_root_state(module: nn.Module, comm: Communicator) -> None:
    """Send rank 0's parameters and buffers to every rank.

    Collective: every rank of ``comm`` calls it, with the same module.
    """
    entries = state_of(module)
    broadcast_tensors({e.name: e.value for e in entries if e.value is not None}, comm)


def follow_root(module: nn.Module, comm: Communicator) -> None:
    """Make layers that are not initialised yet take rank 0's values when they are initialised.

    Collective: every rank calls it. All ranks then make the first calls of the layers in the same
    order.
    """
    for layer in module.modules():
        lazy = [name for name, tensor in _own_tensors(layer) if nn.parameter.is_lazy(tensor)]
        if lazy:
            layer.register_forward_pre_hook(_FollowRoot(lazy, comm))


class _FollowRoot:
    """Hook that gives a layer's tensors rank 0's values once, before the layer's first call.

    PyTorch registers its own hook, which initialises the layer, when the layer is made. So
    PyTorch's hook runs before this one. In a copy of the layer, the hook has no effect, because
    the copy is no replica of a layer on other ranks.
    """

    def __init__(self, names: Sequence[str], comm: Communicator | None) -> None:
        self._names = names
        self._comm = comm

    def __call__(self, layer: nn.Module, args: Any) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            broadcast_tensors({n: getattr(layer, n).detach() for n in self._names}, comm)

    def __deepcopy__(self, memo: Any) -> _FollowRoot:
        return _FollowRoot((), None)


def _own_tensors(layer: nn.Module) -> list[tuple[str, Any]]:
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]


_FRAMEWORK = cuts.Framework(
    Tensors, TensorSession, ModuleFilters, methodcaller("parameters"), state_of, give_root_state,
    follow_root, root_fills=False, computation=computation, memory=memory,
)  # fmt: skip


class Split(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Module that computes its results in pieces: in turn on one device, or over ranks.

    ::

        model = Split(UNet(), data=(8,))              # eight stripes, one after another
        model = Split(UNet(), data=(2,), comm=comm)   # one half on each of two ranks

    The module's own forward method runs unmodified, with a stand-in for the tensor that is cut.
    Split computes three kinds of PyTorch's functions piece by piece:

    - functions that read windows of rows: convolutions and their transposes, pooling, resizing,
      padding, slices;
    - functions that work row by row: activations, sums, concatenated channels;
    - functions of rows with statistics: batch, group and instance normalisation.

    These are exact: the results and all gradients are those of the module, except for the order of
    sums. Other functions get whole tensors, and the cut ends there (:attr:`joined` names them).
    Parameters, buffers and ``state_dict`` are the module's, with names that begin with
    ``module.``.

    **In turn** (``comm=None``), ``data`` and ``batch`` cut the rows into pieces that go through all
    layers one after another. With ``recompute``, each piece goes through the layers once more in
    the backward pass, so that only one piece's activations exist at a time. ``channels`` does the
    same between two layers that mix channels. Normalisation with statistics needs its whole input,
    which is kept.

    **Over ranks**, every rank has a piece of every activation, and the whole module, or with
    ``filters="own"`` its part of the weights. The product of the numbers of pieces is
    ``comm.size``. Before each layer, the ranks exchange the rows that a window needs from other
    ranks. Gradients of parameters that several ranks have are summed over these ranks, in one call
    for all parameters. If the result is whole, every rank computes the same loss from it, as a
    single process would. If the result is in pieces, the loss is the sum of the ranks' losses. To
    add data-parallel training, wrap the Split in ``DistributedDataParallel`` over a communicator of
    the ranks that have the same piece.

    Dropout masks are drawn whole and then cut. In turn, the draw is that of the module itself. Over
    ranks, all ranks draw from generators with the same seed, which rank 0 takes from PyTorch's
    generator.

    Collective: over ranks, every rank makes the split, and calls ``forward``, the backward pass and
    :meth:`verify`. All ranks have the same module and settings. They pass the same input, or their
    pieces of one. When the split is made, rank 0's parameters and buffers go to all ranks. A layer
    that PyTorch initialises in its first call (``nn.LazyConv2d``) takes rank 0's values in that
    call. ``verify``, and every forward pass with ``COLLECTIVE_CHECK=always``, compare the ranks'
    parameters, buffers and inputs bit by bit.

    Args:
        module: module that takes ``(batch, channels, ...)`` as its first argument, which is cut.
        batch: number of pieces of the batch.
        channels: number of pieces of the channels, between layers that mix channels.
        data: number of pieces of each data axis; axes beyond these are not cut.
        comm: communicator of the ranks, which are in the order of batch, channels and data axes,
            with the last axis fastest. None: the pieces are computed in turn.
        recompute: in turn, if true, the backward pass computes pieces again instead of keeping
            their activations.
        inputs: over ranks, form of the input. ``"whole"``: every rank passes the same tensor, and
            gets its whole gradient. ``"pieces"``: every rank passes its own rows, which are joined
            in the order of ranks.
        outputs: over ranks, form of the result: ``"whole"``, or ``"pieces"``, the rank's own rows,
            cut as ``numpy.array_split`` cuts.
        filters: over ranks with ``channels``, weights that a rank keeps. ``"all"``: every rank
            keeps all weights, and computes with the weights of its channels. ``"own"``: every rank
            keeps only the weights of its own channels, in convolutions and linear layers. Groups of
            several channels, and layers with fewer channels than ranks, stay whole. :attr:`module`
            is then this rank's part, and may be called only through this Split. ``parameters()``
            and their gradients are this rank's. ``state_dict`` returns and ``load_state_dict``
            takes the whole weights, which do not depend on the number of ranks; ``state_dict`` is
            collective. If you clip gradients, compute the norm over all ranks; otherwise the
            replicas of common parameters diverge.
        strict: if true, calls that would end the cut raise an error.
        broadcast: over ranks, if true, rank 0's parameters and buffers go to all ranks when the
            split is made. If false, they have to be equal already, and the ranks compare them.

    Attributes:
        joined: names of the calls that took whole tensors in the last forward pass.

    Raises:
        InvalidArgumentError: the numbers are not positive integers, or the number of pieces is not
            the number of ranks. Another option has an unknown value. A layer that is to be cut has
            no weights yet.
        MismatchError: the ranks' settings or modules differ, or, with ``broadcast=False``, their
            values; every rank raises it.
        UnsupportedError: the module contains a module that communicates or that PyTorch compiled,
            or a weight that is to be cut belongs to two layers.
    """

    def __init__(
        self,
        module: torch.nn.Module,
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
        _check_module(module)
        settings = cuts.Settings(
            batch, channels, data, recompute, inputs, outputs, filters, strict, broadcast
        )
        self._cuts = cuts.Cuts(_FRAMEWORK, settings, comm)
        self._comm = comm
        self.module = module
        self.joined: tuple[str, ...] = ()
        for name, layer in module.named_modules():
            kind = type(layer).__name__
            layer.register_forward_pre_hook(partial(_enter, f"{name} ({kind})" if name else kind))
            layer.register_forward_hook(_leave, always_call=True)
        self._filters = self._cuts.prepare(module)
        self._snapshot: Snapshot | None = None
        self._compare()

    def _compare(self) -> None:
        """Follow a change of the parameters that all ranks have made since the last forward pass.

        Raises:
            MismatchError: not all ranks have made the same changes; every rank raises it.
            UnsupportedError: a parameter has changed of which each rank has a piece.
        """
        if self._comm is None:
            return
        if self._snapshot is None:
            # A module that PyTorch has not initialised yet is compared from its second pass on.
            if not any(nn.parameter.is_lazy(p) for p in self.module.parameters()):
                self._snapshot = Snapshot(self.module)
            return
        if not self._snapshot.differs() or self._snapshot.replaced_for_a_call:
            return
        changes = self._snapshot.changes()
        if changes:
            announce(self._comm, "Split", changes)
        if not self._snapshot.has_same_tensors:
            if self._filters is not None:
                raise UnsupportedError(
                    f"Split: filters='own': {changes[0]} after the Split was made [rank "
                    f"{self._comm.rank} of {self._comm.size}]. Make another Split, or pass "
                    "filters='all'."
                )
            self._cuts.prepare(self.module)
        self._snapshot.take()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module.

        Raises:
            InvalidArgumentError: ``x`` is no tensor of at least two dimensions.
            MismatchError: not all ranks have made the same changes of parameters since the last
                pass. With ``COLLECTIVE_CHECK=always``, parameters, buffers or inputs differ between
                ranks. Every rank raises it.
            ShapeError: ``x`` has fewer data axes than are cut; or a layer gets another number of
                channels, or fewer rows, than its weights need.
            UnsupportedError: a function cannot take a tensor that is cut; the text names the layer.
        """
        if not isinstance(x, torch.Tensor) or isinstance(x, Cut) or x.dim() < 2:
            described = "a tensor of another Split" if isinstance(x, Cut) else type(x).__name__
            raise InvalidArgumentError(
                f"Split: {described} as input (expected a tensor of shape (batch, channels, ...))."
            )
        self._compare()
        result, self.joined = self._cuts.computed(self.module, self._filters, x, args, kwargs)
        return result

    def memory_report(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> report.MemoryReport:
        """Count the memory that is kept for the backward pass, by the module and by this Split.

        The call runs both, the module with the whole ``x``, which has to be small enough for that.
        The call leaves random numbers and buffers as they were.

        Args:
            x, args, kwargs: arguments of ``forward``; over ranks the whole ``x``.
        """
        return self._cuts.memory_report(self.module, self._filters, x, args, kwargs)

    def verify(self, x: torch.Tensor, *args: Any, tolerance: float = 1e-10) -> report.Verification:
        """Compare with the module itself: each layer's output, then all gradients, in float64.

        The call leaves parameters, their gradients, buffers and random numbers as they were.

        Args:
            x, args: arguments of ``forward``; over ranks the whole ``x``, the same on all ranks.
            tolerance: largest difference that counts as equal, relative to the largest element.

        Raises:
            MismatchError: parameters, buffers or inputs differ between ranks; every rank raises it.
            InvalidArgumentError: over ranks, a parameter has no values yet.
        """
        return self._cuts.verify(self.module, self._filters, x, args, tolerance)


def _enter(name: str, module: torch.nn.Module, args: Any) -> None:
    """Record that a layer begins to run."""
    session.names.stack.append(name)


def _leave(module: torch.nn.Module, args: Any, result: Any) -> None:
    session.names.stack.pop()


def _check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentError(
            f"Split: module is a {type(module).__name__} (expected a torch.nn.Module)."
        )
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, Split):
            remedy = "Split one module, with all axes in one call."
        elif isinstance(layer, torch.jit.ScriptModule) or kind == "OptimizedModule":
            remedy = "Split the module that it was compiled from."
        elif kind in ("DistributedDataParallel", "DataParallel", "SyncBatchNorm"):
            remedy = (
                "Split the module inside the wrapper, and wrap the Split instead."
                if kind != "SyncBatchNorm"
                else "Use the BatchNorm that it replaces: Split computes its statistics over all "
                "pieces."
            )
        else:
            continue
        raise UnsupportedError(
            f"Split: {name or 'the module'} is a {kind}, which cannot be split. {remedy}"
        )
