"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from collective.errors import InvalidArgumentError, ShapeError
from collective.training.statistics import JoinedBatch, SharedCommunicator

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["SyncBatchNormalization", "convert_batch_normalization"]

_Norm: Any = chainer.links.BatchNormalization
_Node: Any = chainer.FunctionNode
_NOT_PICKLED = (
    "SyncBatchNormalization: a link with a communicator cannot be pickled. Save it by "
    "chainer.serializers, as a BatchNormalization."
)


class SyncBatchNormalization(_Norm):  # type: ignore[misc, unused-ignore]
    """Batch normalisation equal to ``L.BatchNormalization`` over the ranks' batches joined.

    Forward gathers means, sums of squared deviations and counts, once; backward all-reduces two
    sums, once. They are computed in float32 at least, and merged in float64 by the formula of
    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances" (1979), extended to many sets: no large squares are subtracted from each other.

    Batches may be of any lengths, 0 included. Gradients of gamma and beta are this rank's part:
    their average over the ranks, which the optimizer makes, is the joined batch's, if the loss is
    the average of the ranks' losses. There are no second derivatives.

    Collective: all ranks call it in one order while ``chainer.config.train``. If some rank's
    batch or parameters require a gradient, every rank's result has to contribute to its loss;
    backward passes come in the reverse order of the forward ones.

    Args:
        comm: the ranks. Copies of the link share it; it is not pickled.
        size, options: as of ``L.BatchNormalization``.
    """

    def __init__(self, size: Any, comm: Communicator, **options: Any) -> None:
        super().__init__(size, **options)
        self._ranks = SharedCommunicator(comm, _NOT_PICKLED)

    def rebind(self, comm: Communicator) -> None:
        """Go on over another communicator, as all copies of the link do then."""
        self._ranks.comm = comm

    @property
    def comm(self) -> Communicator:
        """The ranks whose batches are one."""
        return self._ranks.comm

    def forward(self, x: Any, **options: Any) -> Any:
        """Normalise a batch.

        Args:
            x: floating point; its shape but for the axes that are normalised over is the same
                on all ranks.
            options: ``finetune=True``: accumulate the population's statistics.

        Raises:
            ShapeError: the shape does not fit the parameters; before anything is sent.
            MismatchError: the ranks' links differ in size; on all ranks.
        """
        if not chainer.config.train:
            return super().forward(x, **options)
        finetune = options.pop("finetune", False)
        if options:
            raise TypeError(f"forward: unknown arguments {', '.join(options)}.")
        x = chainer.as_variable(x)
        if self.avg_mean is None:
            axes = self.axis or ()
            self._initialize_params(tuple(n for i, n in enumerate(x.shape) if i not in axes))
        axes = self._axes(x)
        gamma = self._get_gamma()[0] if self.gamma is None else self.gamma
        beta = self._get_beta()[0] if self.beta is None else self.beta
        wanted = chainer.config.enable_backprop and any(
            isinstance(each, chainer.Variable) and each.requires_grad for each in (x, gamma, beta)
        )
        dtype = np.result_type(x.dtype, gamma.dtype, np.float32)
        joined = _joined(self.comm, x.array, axes, dtype, wanted)
        # A batch that F.forget computes again counts once.
        if not chainer.config.in_recomputing:
            decay = self.decay
            if finetune:
                self.N += 1
                decay = 1.0 - 1.0 / self.N
            self._track(joined, decay)
        # A rank that needs no gradient is in the graph all the same if a peer needs one.
        token = chainer.Variable(self.xp.zeros((), np.float32), requires_grad=joined.wanted)
        found: Any = _Normalise(joined, axes, dtype, self.eps).apply((x, gamma, beta, token))[0]
        return found

    def _axes(self, x: Any) -> tuple[int, ...]:
        """Return the axes that are normalised over."""
        size = self.avg_mean.shape
        axes = self.axis
        if axes is None:
            axes = (0, *range(len(size) + 1, x.ndim))
        if tuple(n for i, n in enumerate(x.shape) if i not in axes) != size:
            raise ShapeError(
                f"SyncBatchNormalization: an input of shape {x.shape}, normalised over the axes "
                f"{axes}; the others must be of lengths {size} "
                f"[rank {self.comm.rank} of {self.comm.size}]."
            )
        return tuple(axes)

    def _track(self, joined: JoinedBatch, decay: float) -> None:
        """Move the running statistics towards a batch's; its variance as an unbiased estimate."""
        if not joined.count:
            return
        for kept, new in ((self.avg_mean, joined.mean), (self.avg_var, joined.unbiased)):
            kept *= decay
            kept += ((1 - decay) * new).reshape(kept.shape).astype(kept.dtype)


def _joined(
    comm: Communicator, x: Any, axes: tuple[int, ...], dtype: Any, wanted: bool
) -> JoinedBatch:
    xp = chainer.backend.get_array_module(x)
    size = math.prod(n for i, n in enumerate(x.shape) if i not in axes)
    count = x.size // size if size else 0
    row = xp.zeros((1, 2 * size + 2), np.float64)
    mean = var = None
    if count:
        mean = x.mean(axis=axes, dtype=dtype).ravel()
        var = x.var(axis=axes, dtype=dtype).ravel()
    return JoinedBatch(comm, row, count, mean, var, wanted)


class _Normalise(_Node):  # type: ignore[misc, unused-ignore]
    """``(x - mean) / sqrt(var + eps) · gamma + beta``, where mean and var are of all ranks' x.

    Args:
        joined: the ranks' batches as one.
        axes: those that are normalised over.
        dtype: in which to compute.
        eps: added to the variance.
    """

    def __init__(self, joined: JoinedBatch, axes: tuple[int, ...], dtype: Any, eps: float) -> None:
        self._joined = joined
        self._axes, self._dtype, self._eps = axes, dtype, eps

    def check_type_forward(self, in_types: Any) -> None:
        chainer.utils.type_check.expect(in_types[0].dtype.kind == "f")

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0, 1))
        x, gamma, beta, _ = inputs
        centred, inverse = self._standard(x)
        scale = inverse * self._spread(gamma, x)
        return ((centred * scale + self._spread(beta, x)).astype(x.dtype, copy=False),)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        if chainer.config.enable_backprop:
            raise InvalidArgumentError(
                "SyncBatchNormalization: enable_double_backprop=True; there are no second "
                "derivatives. Use L.BatchNormalization."
            )
        x, gamma = (each.array for each in self.get_retained_inputs())
        centred, inverse = self._standard(x)
        dy = grad_outputs[0].array.astype(self._dtype, copy=False)
        stack = chainer.backend.get_array_module(x).stack
        scale = inverse * self._spread(gamma, x)
        dx, *parts = self._joined.gradients(dy, centred, inverse, scale, self._axes, stack)
        dgamma, dbeta = (each.reshape(gamma.shape).astype(gamma.dtype) for each in parts)
        found = dx.astype(x.dtype, copy=False), dgamma, dbeta
        return tuple(None if i == 3 else chainer.as_variable(found[i]) for i in indexes)

    def _standard(self, x: Any) -> tuple[Any, Any]:
        """Return the batch less the mean, and what makes its variance 1."""
        joined = self._joined
        inverse = self._spread((joined.var + self._eps) ** -0.5, x)
        return x - self._spread(joined.mean, x), inverse

    def _spread(self, values: Any, x: Any) -> Any:
        """Return one value a mean as it broadcasts against ``x``, in the dtype to compute in."""
        shape = tuple(1 if i in self._axes else n for i, n in enumerate(x.shape))
        return values.reshape(shape).astype(self._dtype, copy=False)


def convert_batch_normalization(link: Any, comm: Communicator) -> Any:
    """Make every ``L.BatchNormalization`` in ``link`` a :class:`SyncBatchNormalization`.

    They change their class and stay the objects that they are: wherever they are kept, with
    their parameters, hooks, update rules and names.

    Args:
        link: of any nesting. It is not touched if anything is refused.
        comm: the ranks whose batches are one.

    Returns:
        ``link``.

    Raises:
        InvalidArgumentError: it has a subclass of a batch normalisation, whose forward would be
            lost; names it.
    """
    norms = [(n, each) for n, each in link.namedlinks() if isinstance(each, _Norm)]
    refused = [
        f"{name or 'the link'} ({type(each).__name__})"
        for name, each in norms
        if type(each) not in (_Norm, SyncBatchNormalization)
    ]
    if refused:
        raise InvalidArgumentError(
            f"convert_batch_normalization: {', '.join(refused)}; only L.BatchNormalization "
            "itself is converted. Replace a subclass by hand."
        )
    for _, each in norms:
        each.__class__ = SyncBatchNormalization
        each._ranks = SharedCommunicator(comm, _NOT_PICKLED)
    return link
