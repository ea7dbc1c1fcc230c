"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from collective import InvalidArgumentError, ShapeError
from collective.inner import comm_or_current, refuses
from collective.training.statistics import JoinedBatch, SharedCommunicator

if TYPE_CHECKING:
    from collective import Communicator

_Norm: Any = chainer.links.BatchNormalization
_Node: Any = chainer.FunctionNode
_NOT_PICKLED = (
    "SyncBatchNormalization: a link with a communicator cannot be pickled. Save it by "
    "chainer.serializers, as a BatchNormalization."
)


class SyncBatchNormalization(_Norm):  # type: ignore[misc, unused-ignore]
    """Batch normalisation equal to ``L.BatchNormalization`` over the joined batches of all ranks.

    The forward pass gathers means, sums of squared deviations and counts, in one call. The backward
    pass all-reduces two sums, in one call. They are computed in float32 or a wider type, and merged
    in float64. The formula is that of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances" (1979), extended to many sets: it never subtracts
    large squares from each other.

    Batches may be of any lengths, 0 included. Gradients of gamma and beta are this rank's part. The
    optimizer averages these parts over the ranks. If the loss is the average of the ranks' losses,
    this average is the gradient of the joined batch. There are no second derivatives.

    Collective: all ranks call it in the same order while ``chainer.config.train`` is true. If some
    rank's batch or parameters require a gradient, every rank's result has to contribute to its
    loss. Backward passes run in the reverse order of the forward passes.

    Args:
        comm: ranks whose batches are joined; None: those of the current communicator. Copies of the
            link share the communicator; it is not pickled.
        size, options: those of ``L.BatchNormalization``.
    """

    @refuses({"communication_backend": "leave it out: the communicator's transport is used"})
    def __init__(self, size: Any, comm: Communicator | None = None, **options: Any) -> None:
        super().__init__(size, **options)
        comm = comm_or_current(comm, "SyncBatchNormalization")
        self._ranks = SharedCommunicator(comm, _NOT_PICKLED)

    def rebind(self, comm: Communicator) -> None:
        """Continue over another communicator; all copies of the link do so, too."""
        self._ranks.comm = comm

    @property
    def comm(self) -> Communicator:
        """Ranks whose batches are joined."""
        return self._ranks.comm

    def forward(self, x: Any, **options: Any) -> Any:
        """Normalise a batch.

        Args:
            x: floating-point batch. Its lengths along the axes that are not normalised over are
                the same on all ranks.
            options: ``finetune=True`` accumulates the statistics of the population.

        Raises:
            ShapeError: the shape does not fit the parameters; raised before anything is sent.
            MismatchError: the ranks' links differ in size; every rank raises it.
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
            isinstance(v, chainer.Variable) and v.requires_grad for v in (x, gamma, beta)
        )
        dtype = np.result_type(x.dtype, gamma.dtype, np.float32)
        joined = _joined(self.comm, x.array, axes, dtype, wanted)
        # A batch that F.forget computes a second time counts once.
        if not chainer.config.in_recomputing:
            decay = self.decay
            if finetune:
                self.N += 1
                decay = 1.0 - 1.0 / self.N
            self._track(joined, decay)
        # If a peer needs a gradient, this rank is in the graph as well, even if it needs none.
        token = chainer.Variable(self.xp.zeros((), np.float32), requires_grad=joined.wanted)
        result: Any = _Normalise(joined, axes, dtype, self.eps).apply((x, gamma, beta, token))[0]
        return result

    def _axes(self, x: Any) -> tuple[int, ...]:
        """Return the axes that are normalised over, and check the shape of ``x``."""
        size = self.avg_mean.shape
        axes = self.axis
        if axes is None:
            axes = (0, *range(len(size) + 1, x.ndim))
        if tuple(n for i, n in enumerate(x.shape) if i not in axes) != size:
            raise ShapeError(
                f"SyncBatchNormalization: an input of shape {x.shape}, normalised over the axes "
                f"{axes}, does not fit the parameters (expected lengths {size} along the other "
                f"axes) [rank {self.comm.rank} of {self.comm.size}]. Pass an input of that shape, "
                "or make the link with another size."
            )
        return tuple(axes)

    def _track(self, joined: JoinedBatch, decay: float) -> None:
        """Move the running statistics towards a batch's mean and unbiased variance."""
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
    """``(x - mean) / sqrt(var + eps) · gamma + beta``, with mean and var over all ranks' ``x``.

    Args:
        joined: joined batches of the ranks.
        axes: axes that are normalised over.
        dtype: dtype of the computation.
        eps: number that is added to the variance.
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
                "SyncBatchNormalization: enable_double_backprop=True, but there are no second "
                "derivatives. Use L.BatchNormalization instead."
            )
        x, gamma = (variable.array for variable in self.get_retained_inputs())
        centred, inverse = self._standard(x)
        dy = grad_outputs[0].array.astype(self._dtype, copy=False)
        stack = chainer.backend.get_array_module(x).stack
        scale = inverse * self._spread(gamma, x)
        dx, *parts = self._joined.gradients(dy, centred, inverse, scale, self._axes, stack)
        dgamma, dbeta = (part.reshape(gamma.shape).astype(gamma.dtype) for part in parts)
        gradients = dx.astype(x.dtype, copy=False), dgamma, dbeta
        return tuple(None if i == 3 else chainer.as_variable(gradients[i]) for i in indexes)

    def _standard(self, x: Any) -> tuple[Any, Any]:
        """Return the batch minus the mean, and the factor that makes its variance 1."""
        joined = self._joined
        inverse = self._spread((joined.var + self._eps) ** -0.5, x)
        return x - self._spread(joined.mean, x), inverse

    def _spread(self, values: Any, x: Any) -> Any:
        """Return values, one for each mean, in the compute dtype and broadcastable to ``x``."""
        shape = tuple(1 if i in self._axes else n for i, n in enumerate(x.shape))
        return values.reshape(shape).astype(self._dtype, copy=False)


def convert_batch_normalization(link: Any, comm: Communicator | None = None) -> Any:
    """Turn every ``L.BatchNormalization`` in ``link`` into a :class:`SyncBatchNormalization`.

    The links change their class, and stay the same objects. So they keep their places, parameters,
    hooks, update rules and names.

    Args:
        link: link of any nesting. It is unchanged if the function raises.
        comm: ranks whose batches are joined; None: those of the current communicator.

    Returns:
        ``link``.

    Raises:
        InvalidArgumentError: the link contains a subclass of a batch normalisation, whose forward
            method would be lost. The error names it.
    """
    comm = comm_or_current(comm, "convert_batch_normalization")
    norms = [(path, child) for path, child in link.namedlinks() if isinstance(child, _Norm)]
    refused = [
        f"{path or 'the link'} ({type(child).__name__})"
        for path, child in norms
        if type(child) not in (_Norm, SyncBatchNormalization)
    ]
    if refused:
        raise InvalidArgumentError(
            f"convert_batch_normalization: cannot convert {', '.join(refused)}: only "
            "L.BatchNormalization itself is converted. Replace a subclass by hand."
        )
    for _, child in norms:
        child.__class__ = SyncBatchNormalization
        child._ranks = SharedCommunicator(comm, _NOT_PICKLED)
    return link
