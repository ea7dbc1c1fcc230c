"""``Split``: a module computed in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import torch

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, UnsupportedError
from collective.training.splits.cuts import Cuts, Framework
from collective.training.splits.report import MemoryReport, Verification
from collective.training.splits.session import names
from collective.training.splits.settings import Settings

from .filters import ModuleFilters
from .replicas import follow_root, give_root_state, state_of
from .session import Cut, TensorSession
from .tensors import Tensors
from .verifying import memory_report, verify

__all__ = ["Split"]

_FRAMEWORK = Framework(
    Tensors, TensorSession, ModuleFilters, methodcaller("parameters"), state_of, give_root_state,
    follow_root, root_fills=False,
)  # fmt: skip


class Split(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A module that computes the same in pieces: in turn on one device, or over ranks.

    ::

        model = Split(UNet(), data=(8,))              # eight stripes, one after another
        model = Split(UNet(), data=(2,), comm=comm)   # one half on each of two ranks

    The module's own forward is run, unmodified, with a tensor that stands for the cut one.
    PyTorch's functions that read windows of rows (convolutions and their transposes, pooling,
    resizing, padding, slices), row for row (activations, sums, concatenated channels), or rows with
    statistics (batch, group and instance normalisation) are computed piece by piece, exactly: the
    results and all gradients are those of the module, but for the order of sums. Other functions
    get whole tensors, and the cut ends there (:attr:`joined` names them). Parameters, buffers and
    ``state_dict`` are the module's, under ``module.``.

    **In turn** (``comm=None``), the rows of ``data`` and ``batch`` go through all layers piece by
    piece, with ``recompute`` each once more in the backward pass, so that only one piece's
    activations exist at a time; ``channels`` does the same between two layers that mix channels.
    Normalisation with statistics needs its whole input, which is kept.

    **Over ranks**, every rank has the whole module, or with ``filters="own"`` its part of the
    weights, and a piece of every activation. The pieces' product is ``comm.size``. Rows that a
    window needs of other ranks are exchanged before each layer (``halo="layer"``), or once for all
    layers up to the next normalisation, the inner rows being computed twice (``halo="chain"``).
    Gradients of parameters that ranks have in common are summed over them, in one call for all. If
    the result is whole, every rank computes the same loss of it, and everything is as in one
    process; if it is in pieces, the loss is the sum of the ranks' losses. For data-parallel
    training beside it, wrap this in ``DistributedDataParallel`` over a communicator of the ranks
    that have the same piece.

    Dropout masks are drawn whole and cut. In turn that is the draw of the module itself; over ranks
    all ranks draw from one generator, whose seed rank 0 takes from PyTorch's.

    Collective: over ranks, making it, ``forward``, the backward pass and :meth:`verify` are. All
    ranks have the same module and settings. They pass the same input, or their pieces of one.
    Rank 0's parameters and buffers go to all ranks when the split is made; a layer that PyTorch
    initialises in its first call (``nn.LazyConv2d``) takes rank 0's values then. ``verify``, and
    every forward pass with ``COLLECTIVE_CHECK=always``, compare the ranks' parameters, buffers and
    inputs bit by bit.

    Args:
        module: takes ``(batch, channels, ...)`` as first argument; that one is cut.
        batch: pieces of the batch.
        channels: pieces of the channels between layers that mix them.
        data: pieces of each data axis; further ones are not cut.
        comm: the ranks, in the order of batch, channels and data axes, the last fastest; None: in
            turn.
        recompute: whether pieces are computed again in the backward pass instead of being kept;
            over ranks only with ``halo="chain"``.
        halo: ``"layer"`` or ``"chain"``.
        inputs: over ranks ``"whole"``: every rank passes the same tensor, and gets all of its
            gradient; ``"pieces"``: every rank passes its own rows, joined in the order of ranks.
        outputs: over ranks ``"whole"``, or ``"pieces"``: every rank's own rows, cut as
            ``numpy.array_split`` cuts.
        filters: over ranks with ``channels``: ``"all"``: every rank keeps all weights, and computes
            with those of its channels; ``"own"``: it keeps of convolutions and linear layers those
            of its channels alone (groups of several channels, and layers of fewer channels than
            ranks, it keeps whole). :attr:`module` is then this rank's part, to be called through
            this alone, ``parameters()`` and their gradients are this rank's, and ``state_dict`` and
            ``load_state_dict`` give and take the whole weights, so that they do not depend on the
            number of ranks; ``state_dict`` is collective. Clip gradients by a norm that is
            computed over the ranks, or replicated parameters part ways.
        strict: refuse calls that would end the cut.
        broadcast: over ranks, whether rank 0's parameters and buffers go to all ranks when the
            split is made. If false, they have to be equal already, and the ranks compare them.

    Attributes:
        joined: of the last forward, the calls that took whole tensors.

    Raises:
        InvalidArgumentError: the numbers are not positive integers, the pieces are not as many as
            the ranks, or another option is none of its values; or a layer that is to be cut has no
            weights yet.
        MismatchError: the ranks' settings or modules differ, or with ``broadcast=False`` their
            values; on every rank.
        UnsupportedError: the module contains one that communicates or that PyTorch compiled, or a
            weight that is to be cut belongs to two layers.
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
        halo: str = "layer",
        inputs: str = "whole",
        outputs: str = "whole",
        filters: str = "all",
        strict: bool = False,
        broadcast: bool = True,
    ) -> None:
        super().__init__()
        _check_module(module)
        settings = Settings(
            batch, channels, data, recompute, halo, inputs, outputs, filters, strict, broadcast
        )
        self._cuts = Cuts(_FRAMEWORK, settings, comm)
        self.module = module
        self.joined: tuple[str, ...] = ()
        for name, layer in module.named_modules():
            kind = type(layer).__name__
            layer.register_forward_pre_hook(partial(_enter, f"{name} ({kind})" if name else kind))
            layer.register_forward_hook(_leave, always_call=True)
        self._filters = self._cuts.prepare(module)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns.

        Raises:
            InvalidArgumentError: ``x`` is no tensor of two dimensions or more.
            MismatchError: with ``COLLECTIVE_CHECK=always``, parameters, buffers or inputs differ
                between ranks; on every rank.
            ShapeError: it has fewer data axes than are cut, or a layer gets other channels, or
                fewer rows, than its weights are for.
            UnsupportedError: a function cannot be called on a tensor that is cut; the text names
                the layer.
        """
        if not isinstance(x, torch.Tensor) or isinstance(x, Cut) or x.dim() < 2:
            given = "a tensor of another Split" if isinstance(x, Cut) else type(x).__name__
            raise InvalidArgumentError(f"Split: {given} as input; a tensor (batch, channels, ...).")
        found, self.joined = self._cuts.computed(self.module, self._filters, x, args, kwargs)
        return found

    def memory_report(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> MemoryReport:
        """Count what is kept for the backward pass, of the module and of this.

        Both are run, the module whole, so that ``x`` has to be small enough for that. Random
        numbers and buffers are as before afterwards.

        Args:
            x, args, kwargs: as of ``forward``; over ranks the whole ``x``.
        """
        return memory_report(self._cuts.copies(self.module, self._filters), x, args, kwargs)

    def verify(self, x: torch.Tensor, *args: Any, tolerance: float = 1e-10) -> Verification:
        """Compare with the module itself: each layer's output, then all gradients, in float64.

        Parameters, their gradients, buffers and random numbers are as before afterwards.

        Args:
            x, args: as of ``forward``; over ranks the whole ``x``, the same on all.
            tolerance: what counts as equal, relative to the largest element.

        Raises:
            MismatchError: parameters, buffers or inputs differ between ranks; on every rank.
            InvalidArgumentError: over ranks, a parameter has no values yet.
        """
        self._cuts.check_replicas(self.module, self._filters)
        self._cuts.check_inputs(x, args, {}, ends="whole")
        return verify(self._cuts.copies(self.module, self._filters), x, args, tolerance)


def _enter(name: str, module: torch.nn.Module, args: Any) -> None:
    """Say which layer is running."""
    names.stack.append(name)


def _leave(module: torch.nn.Module, args: Any, result: Any) -> None:
    names.stack.pop()


def _check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentError(f"Split: {type(module).__name__}; a torch.nn.Module.")
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, Split):
            remedy = "Split one module, with all axes in one call."
        elif isinstance(layer, torch.jit.ScriptModule) or kind == "OptimizedModule":
            remedy = "Split the module that it was compiled from."
        elif kind in ("DistributedDataParallel", "DataParallel", "SyncBatchNorm"):
            remedy = (
                "Wrap the split in it."
                if kind != "SyncBatchNorm"
                else "Take the BatchNorm that it replaces: Split computes its statistics over all "
                "pieces."
            )
        else:
            continue
        raise UnsupportedError(
            f"Split: {name or 'the module'} is a {kind}, which cannot be split. {remedy}"
        )
