"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, ShapeError
from collective.training.statistics import JoinedBatch, SharedCommunicator

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

_Norm: Any = torch.nn.modules.batchnorm._BatchNorm
_LazyNorm: Any = torch.nn.modules.batchnorm._LazyNormBase
_normalise: Any = torch.nn.functional.batch_norm
_NOT_PICKLED = (
    "SyncBatchNorm: a module with a communicator cannot be pickled. Save its state_dict(), which "
    "is that of a BatchNorm."
)


class SyncBatchNorm(_Norm):  # type: ignore[misc, unused-ignore]
    """Batch normalisation equal to ``torch.nn.BatchNorm`` over the ranks' batches joined.

    Forward gathers the channels' means, sums of squared deviations and counts, once; backward
    all-reduces two sums a channel, once. Statistics are computed in float32 (in float64 for
    float64 inputs), and merged in float64 by the formula of Chan, Golub and LeVeque, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979), extended to many
    sets: no large squares are subtracted from each other.

    Batches may be of any lengths, 0 included. Gradients of weight and bias are this rank's part:
    their sum over the ranks is the joined batch's, as for any parameter, if the loss is the sum of
    the ranks' losses. There are no second derivatives.

    Collective: all ranks call it in one order, in training, and in evaluation too if it has no
    running statistics. If some rank's input requires a gradient, every rank's result has to
    contribute to its loss; backward calls come in the reverse order of the forward ones.

    Args:
        num_features: channels, the length of the input's second dimension.
        comm: the ranks. Copies of the module share it; it is not pickled.
        eps: added to the variance.
        momentum: the weight of the new in the running statistics; None for their plain average.
        affine: whether there are a weight and a bias.
        track_running_stats: whether there are running statistics, which evaluation uses.
        device, dtype: of parameters and statistics.
    """

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self._ranks = SharedCommunicator(comm, _NOT_PICKLED)

    def rebind(self, comm: Communicator) -> None:
        """Go on over another communicator, as all copies of the module do then."""
        self._ranks.comm = comm

    @property
    def comm(self) -> Communicator:
        """The ranks whose batches are one."""
        return self._ranks.comm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise a batch.

        Args:
            x: ``(N, C, ...)``, floating point; ``N`` and what follows ``C`` may differ by rank.

        Returns:
            A tensor of the shape and dtype of ``x``.

        Raises:
            ShapeError: ``x`` has another number of channels (before anything is sent), or all
                ranks together one value a channel, of which there is no variance (on all).
            MismatchError: the ranks' modules differ in their number of channels; on all ranks.
        """
        self._check_input(x)
        tracks = self.training and self.track_running_stats
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        known = self.running_mean is not None and self.running_var is not None
        kind = torch.float64 if x.dtype is torch.float64 else torch.float32
        weight, bias = (None if p is None else p.to(kind) for p in (self.weight, self.bias))
        if known and not self.training:
            mean, var = self.running_mean.to(kind), self.running_var.to(kind)
            found: torch.Tensor = _normalise(x, mean, var, weight, bias, False, 0.0, self.eps)
            return found
        comm = self.comm
        wanted = torch.is_grad_enabled() and x.requires_grad
        with torch.no_grad():
            joined = _joined(x.detach(), comm, wanted)
            if joined.count == 1:
                raise ShapeError(
                    f"SyncBatchNorm: one value a channel in all batches together; two or more "
                    f"when training [rank {comm.rank} of {comm.size}]. Pass larger batches, or "
                    "call eval()."
                )
            if tracks and known and joined.count:
                self._track(joined)
        # A rank that needs no gradient is in the graph all the same if a peer needs one.
        token = torch.zeros((), requires_grad=joined.wanted and torch.is_grad_enabled())
        mean, var = joined.mean.to(kind), joined.var.to(kind)
        normalise: Any = _Normalise.apply
        result: torch.Tensor = normalise(x, weight, bias, token, mean, var, self.eps, joined)
        return result

    def _check_input(self, x: torch.Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ShapeError(
                f"SyncBatchNorm: an input of shape {tuple(x.shape)}; (N, {self.num_features}, ...) "
                f"[rank {self.comm.rank} of {self.comm.size}]."
            )
        if not x.is_floating_point():
            raise InvalidArgumentError(f"SyncBatchNorm: {x.dtype}; floating point. Use x.float().")

    def _track(self, joined: JoinedBatch) -> None:
        """Move the running statistics towards a batch's; its variance as an unbiased estimate."""
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        for kept, new in (
            (self.running_mean, joined.mean),
            (self.running_var, joined.unbiased),
        ):
            kept.copy_(kept.to(new.dtype).lerp_(new, share))


def _joined(x: torch.Tensor, comm: Communicator, wanted: bool) -> JoinedBatch:
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    row = torch.zeros(1, 2 * channels + 2, dtype=torch.float64, device=x.device)
    var = mean = None
    if count:
        wide = x if x.dtype is torch.float64 else x.float()
        var, mean = torch.var_mean(wide, _but_channels(x), correction=0)
    return JoinedBatch(comm, row, count, mean, var, wanted)


def _but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


class _Normalise(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """``(x - mean) / sqrt(var + eps) · weight + bias``, where mean and var are of all ranks' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        weight: Any,
        bias: Any,
        token: Any,
        mean: Any,
        var: Any,
        eps: float,
        joined: JoinedBatch,
    ) -> Any:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps))
        ctx.joined = joined
        return _normalise(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        scale = inverse if weight is None else inverse * weight
        found = ctx.joined.gradients(
            dy.to(mean.dtype), x.to(mean.dtype) - mean.view(shape), inverse.view(shape),
            scale.view(shape), _but_channels(x), torch.stack,
        )  # fmt: skip
        dx, dweight, dbias = (
            each if needed else None for each, needed in zip(found, ctx.needs_input_grad)
        )
        return (
            dx.to(x.dtype) if dx is not None else None,
            dweight.view(-1) if dweight is not None else None,
            dbias.view(-1) if dbias is not None else None,
            *[None] * 5,
        )


_CONVERTED = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)


def convert_sync_batchnorm(module: torch.nn.Module, comm: Communicator) -> torch.nn.Module:
    """Make every batch normalisation in ``module`` a :class:`SyncBatchNorm`.

    Parameters, buffers, hooks, the training flag and the names in ``state_dict()`` stay, as do
    references to parameters in an optimizer. A module used in several places stays one.

    Args:
        module: of any nesting, or a batch normalisation itself. It is changed where it contains
            one, and not touched if anything is refused.
        comm: the ranks whose batches are one.

    Returns:
        ``module``, or what takes its place if it is a batch normalisation itself.

    Raises:
        InvalidArgumentError: a lazy one, whose channels are not known yet, or an own subclass of
            a batch normalisation, whose forward would be lost; names them.
    """
    found: dict[torch.nn.Module, str] = {
        child: name for name, child in module.named_modules() if isinstance(child, _Norm)
    }
    refused = []
    for child, name in found.items():
        at = f"{name or 'the module'} ({type(child).__name__})"
        if isinstance(child, _LazyNorm):
            refused.append(f"{at} is lazy: run a batch through the module first")
        elif type(child) not in (*_CONVERTED, SyncBatchNorm):
            refused.append(f"{at} is a subclass: replace it by hand")
    if refused:
        raise InvalidArgumentError(f"convert_sync_batchnorm: {'; '.join(refused)}.")
    made = {child: _converted(child, comm) for child in found}
    for parent in list(module.modules()):
        for name, part in parent._modules.items():
            if part in made:
                parent._modules[name] = made[part]
    return made.get(module, module)


def _converted(norm: torch.nn.Module, comm: Communicator) -> SyncBatchNorm:
    """Return a SyncBatchNorm that has all that ``norm`` has."""
    made = SyncBatchNorm.__new__(SyncBatchNorm)
    # Shallow but for the tables: the parameters are the same, a later register_… is not.
    made.__dict__.update(
        (key, copy.copy(value) if isinstance(value, dict) else value)
        for key, value in norm.__dict__.items()
    )
    made._ranks = SharedCommunicator(comm, _NOT_PICKLED)
    return made
