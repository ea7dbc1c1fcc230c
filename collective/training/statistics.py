"""The statistics of all ranks' batches as one, for batch normalisation in any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError

__all__ = ["JoinedBatch", "SharedCommunicator"]


class JoinedBatch:
    """What the ranks' batches are together, and what a gradient of them is.

    The statistics are merged in float64, in one all-gather, by the formula of Chan, Golub and
    LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979),
    extended to many sets: no large squares are subtracted from each other.

    Collective: every rank makes it, with as many means.

    Args:
        comm: the ranks; one alone sends nothing.
        row: float64 zeros of shape ``(1, 2 means + 2)`` where the batch is, to be written to. Of
            two dimensions, since lengths along the first may differ by rank: others are compared.
        count: values behind each of this rank's means; 0 for an empty batch.
        mean, var: of this rank's batch, of one dimension: the biased variance. Of an empty one
            they are not read.
        wanted: whether this rank wants gradients.

    Attributes:
        count: values behind each mean.
        mean, var: float64, of one dimension, where the batch is; zeros if there are no values.
        wanted: whether some rank wants gradients. Then all of them call :meth:`gradients`.

    Raises:
        MismatchError: the ranks have different numbers of means; on all ranks.
    """

    def __init__(
        self, comm: Communicator, row: Any, count: int, mean: Any, var: Any, wanted: bool
    ) -> None:
        # Slices, sum and any are the same in PyTorch, NumPy and CuPy: a namespace of the array
        # API for them took 40 µs of the 900 of a small layer's step.
        size = row.shape[1] // 2 - 1
        row[0, -2], row[0, -1] = count, wanted
        if count:
            row[0, :size] = mean
            row[0, size:-2] = var
            row[0, size:-2] *= count
        every = comm.all_gather(row, counts=[1] * comm.size) if comm.size > 1 else row
        counts, means, squares = every[:, -2:-1], every[:, :size], every[:, size:-2]
        self._comm = comm
        self.count = int(counts.sum())
        many = max(self.count, 1)
        self.mean = (counts * means).sum(0) / many
        self.var = (squares + counts * (means - self.mean) ** 2).sum(0) / many
        self.wanted = bool(every[:, -1].any())

    @property
    def unbiased(self) -> Any:
        """The estimate of the variance that running statistics take; zeros of one value."""
        return self.var * (self.count / max(self.count - 1, 1))

    def gradients(
        self,
        dy: Any,
        centred: Any,
        inverse: Any,
        scale: Any,
        axes: Sequence[int],
        stack: Callable[[list[Any]], Any],
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of ``centred · scale + bias``, the result of the normalisation.

        Ioffe and Szegedy, "Batch Normalization" (2015), section 3, with
        x̂ = centred · inverse: dx = scale · (dy - E[dy] - x̂ · E[dy · x̂]).

        Collective if some rank wants gradients: one all-reduce of two sums a mean.

        Args:
            dy: the result's, in the dtype to compute in.
            centred: this rank's batch less :attr:`mean`, in that dtype.
            inverse: ``(var + eps) ** -0.5``, of a shape that broadcasts against the batch.
            scale: ``inverse · weight``, so too.
            axes: those that are normalised over.
            stack: the framework's.

        Returns:
            The batch's, which is exact, and those of weight and bias, which are this rank's part,
            of the shape of ``inverse``.
        """
        sums = stack([dy.sum(axes, keepdims=True), (dy * centred).sum(axes, keepdims=True)])
        joined = sums  # which stay as they are: weight and bias get this rank's part
        if self.wanted and self._comm.size > 1:
            joined = self._comm.all_reduce(sums)
        first, second = joined / max(self.count, 1)
        dx = dy - first - centred * (second * inverse**2)
        dx *= scale
        return dx, sums[1] * inverse, sums[0]


class SharedCommunicator:
    """Holds a communicator where it is neither copied nor pickled with a layer.

    Args:
        comm: the ranks.
        refusal: what an attempt to pickle it says.
    """

    def __init__(self, comm: Communicator, refusal: str) -> None:
        self.comm = comm
        self._refusal = refusal

    def __deepcopy__(self, memo: Any) -> SharedCommunicator:
        return self

    def __reduce__(self) -> Any:
        raise InvalidArgumentError(self._refusal)
