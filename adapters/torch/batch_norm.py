"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch

from collective import Communicator, InvalidArgumentError, ShapeError
from collective.inner import comm_or_current, refuses
from collective.training.statistics import JoinedBatch, SharedCommunicator

_Norm: Any = torch.nn.modules.batchnorm._BatchNorm
_LazyNorm: Any = torch.nn.modules.batchnorm._LazyNormBase
_TORCHS = {"bias": "it has no equivalent here; see affine=", "process_group": "use comm="}
_normalise: Any = torch.nn.functional.batch_norm
_NOT_PICKLED = (
    "SyncBatchNorm: a module with a communicator cannot be pickled. Save its state_dict(), which "
    "a BatchNorm can load."
)


class SyncBatchNorm(_Norm):  # type: ignore[misc, unused-ignore]
    """Batch normalisation equal to ``torch.nn.BatchNorm`` over the joined batches of all ranks.

    The forward pass gathers the channels' means, sums of squared deviations and counts, in one
    call. The backward pass all-reduces two sums for each channel, in one call. Statistics are
    computed in float32 (in float64 for float64 inputs), and merged in float64. The formula is that
    of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances" (1979), extended to many sets: it never subtracts large squares from each other.

    Batches may be of any lengths, 0 included. Gradients of weight and bias are this rank's part. If
    the loss is the sum of the ranks' losses, the sum of these parts is the gradient of the joined
    batch, as for any parameter. There are no second derivatives.

    Collective: all ranks call it in the same order, in training; without running statistics also
    in evaluation. If some rank's input requires a gradient, every rank's result has to contribute
    to its loss. Backward passes run in the reverse order of the forward passes.

    Args:
        num_features: number of channels, the length of the input's second dimension.
        comm: ranks whose batches are joined; None: those of the current communicator. Copies of the
            module share the communicator; it is not pickled.
        eps: number that is added to the variance.
        momentum: weight of the new batch in the running statistics; None: their plain average.
        affine: if true, the module has a weight and a bias.
        track_running_stats: if true, the module has running statistics, which evaluation uses.
        device, dtype: device and dtype of parameters and statistics.
    """

    @refuses(_TORCHS)
    def __init__(
        self,
        num_features: int,
        comm: Communicator | None = None,
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
        self._ranks = SharedCommunicator(comm_or_current(comm, "SyncBatchNorm"), _NOT_PICKLED)

    def rebind(self, comm: Communicator) -> None:
        """Continue over another communicator; all copies of the module do so, too."""
        self._ranks.comm = comm

    @property
    def comm(self) -> Communicator:
        """Ranks whose batches are joined."""
        return self._ranks.comm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise a batch.

        Args:
            x: floating-point batch of shape ``(N, C, ...)``; ranks may differ in all lengths
                except ``C``.

        Returns:
            A tensor of the shape and dtype of ``x``.

        Raises:
            ShapeError: ``x`` has another number of channels; raised before anything is sent. Or
                the joined batch has a single value per channel, which has no variance; every rank
                raises it.
            MismatchError: the ranks' modules differ in their number of channels; every rank raises
                it.
        """
        self._check_input(x)
        tracks = self.training and self.track_running_stats
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        has_statistics = self.running_mean is not None and self.running_var is not None
        kind = torch.float64 if x.dtype is torch.float64 else torch.float32
        weight, bias = (None if p is None else p.to(kind) for p in (self.weight, self.bias))
        if has_statistics and not self.training:
            mean, var = self.running_mean.to(kind), self.running_var.to(kind)
            y: torch.Tensor = _normalise(x, mean, var, weight, bias, False, 0.0, self.eps)
            return y
        comm = self.comm
        wanted = torch.is_grad_enabled() and x.requires_grad
        with torch.no_grad():
            joined = _joined(x.detach(), comm, wanted)
            if joined.count == 1:
                raise ShapeError(
                    f"SyncBatchNorm: the batches of all ranks have one value per channel together "
                    f"(expected at least 2 in training) [rank {comm.rank} of {comm.size}]. Pass "
                    "larger batches, or call eval()."
                )
            if tracks and has_statistics and joined.count:
                self._track(joined)
        # If a peer needs a gradient, this rank is in the graph as well, even if it needs none.
        token = torch.zeros(
            (), device="cpu", requires_grad=joined.wanted and torch.is_grad_enabled()
        )
        mean, var = joined.mean.to(kind), joined.var.to(kind)
        normalise: Any = _Normalise.apply
        result: torch.Tensor = normalise(x, weight, bias, token, mean, var, self.eps, joined)
        return result

    def _check_input(self, x: torch.Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ShapeError(
                f"SyncBatchNorm: the input has shape {tuple(x.shape)} (expected "
                f"(N, {self.num_features}, ...)) [rank {self.comm.rank} of {self.comm.size}]."
            )
        if not x.is_floating_point():
            raise InvalidArgumentError(
                f"SyncBatchNorm: the input is {x.dtype} (expected floating point). Use x.float()."
            )

    def _track(self, joined: JoinedBatch) -> None:
        """Update the running statistics by those of a batch, with its unbiased variance."""
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
    """``(x - mean) / sqrt(var + eps) · weight + bias``, with mean and var of all ranks' ``x``."""

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
        gradients = ctx.joined.gradients(
            dy.to(mean.dtype), x.to(mean.dtype) - mean.view(shape), inverse.view(shape),
            scale.view(shape), _but_channels(x), torch.stack,
        )  # fmt: skip
        dx, dweight, dbias = (
            gradient if needed else None
            for gradient, needed in zip(gradients, ctx.needs_input_grad)
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


@refuses(_TORCHS)
def convert_sync_batchnorm(
    module: torch.nn.Module, comm: Communicator | None = None
) -> torch.nn.Module:
    """Replace every batch normalisation in ``module`` by a :class:`SyncBatchNorm`.

    Parameters, buffers, hooks, the training flag and the names in ``state_dict()`` stay the same.
    An optimizer's references to parameters stay valid. A batch normalisation that is used in
    several places becomes a single SyncBatchNorm in these places.

    Args:
        module: module of any nesting, changed in place, or a batch normalisation itself. If the
            call raises an error, nothing is changed.
        comm: ranks whose batches are joined; None: those of the current communicator.

    Returns:
        ``module``, or its replacement if it is a batch normalisation itself.

    Raises:
        InvalidArgumentError: a batch normalisation is lazy, so that its number of channels is
            unknown; or it is of a custom subclass, whose forward method would be lost. The text
            names all of these.
    """
    comm = comm_or_current(comm, "convert_sync_batchnorm")
    norms: dict[torch.nn.Module, str] = {
        child: name for name, child in module.named_modules() if isinstance(child, _Norm)
    }
    refused = []
    for child, name in norms.items():
        at = f"{name or 'the module'} ({type(child).__name__})"
        if isinstance(child, _LazyNorm):
            refused.append(f"{at} is lazy: run a batch through the module first")
        elif type(child) not in (*_CONVERTED, SyncBatchNorm):
            refused.append(f"{at} is a subclass: replace it by hand")
    if refused:
        raise InvalidArgumentError(f"convert_sync_batchnorm: {'; '.join(refused)}.")
    converted = {child: _converted(child, comm) for child in norms}
    for parent in list(module.modules()):
        for name, part in parent._modules.items():
            if part in converted:
                parent._modules[name] = converted[part]
    return converted.get(module, module)


def _converted(norm: torch.nn.Module, comm: Communicator) -> SyncBatchNorm:
    """Return a SyncBatchNorm with the attributes of ``norm``."""
    sync = SyncBatchNorm.__new__(SyncBatchNorm)
    # The copy is shallow except for the dicts: both modules share the parameters, but a later
    # register_…() affects only one of them.
    sync.__dict__.update(
        (key, copy.copy(value) if isinstance(value, dict) else value)
        for key, value in norm.__dict__.items()
    )
    sync._ranks = SharedCommunicator(comm, _NOT_PICKLED)
    return sync
