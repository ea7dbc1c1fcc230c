"""Training on uneven inputs: ranks without inputs take part with zeros until no rank has any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from collective import GradientError

if TYPE_CHECKING:
    from collective import Communicator


class Attendance:
    """Record of the ranks that still have inputs.

    Args:
        comm: communicator that connects the ranks.
        by_all: if true, averages are over all ranks; if false, over the ranks that still have
            inputs.
    """

    def __init__(self, comm: Communicator, by_all: bool) -> None:
        self._comm = comm
        self._by_all = by_all
        self._here = [True] * comm.size
        self._due = False  # whether this rank still has to reduce gradients in this step

    def forward(self) -> None:
        """Take part in a step whose gradients will be reduced.

        Collective: every rank calls it, or is in :meth:`rest`.

        Raises:
            GradientError: the previous step had no gradients.
        """
        self.leave()
        self.step(True)
        self._due = True

    def backward(self) -> None:
        """Record that the gradients of this step are about to be reduced.

        Raises:
            GradientError: the gradients of this step have been reduced already.
        """
        if not self._due:
            raise self._error("a second backward pass reduces the gradients of one step")
        self._due = False

    def leave(self) -> None:
        """Record that this step is over.

        Raises:
            GradientError: the step had no gradients.
        """
        if self._due:
            raise self._error("a forward pass had no backward pass")

    def _error(self, what: str) -> GradientError:
        # The ranks without inputs take part in exactly one reduction for each forward pass.
        return GradientError(
            f"join: {what} [rank {self._comm.rank} of {self._comm.size}]. Inside of join() each "
            "forward pass must have one backward pass, before the next forward pass. Forward "
            "passes within no_sync() or torch.no_grad() are exempt."
        )

    def step(self, here: bool) -> bool:
        """Announce whether this rank has inputs for a step; return whether any rank has inputs.

        Collective: every rank calls it.
        """
        self._here = self._comm.all_gather_object(here)
        return any(self._here)

    @property
    def root(self) -> int:
        """Lowest rank with inputs in this step; after the loop, in the last step with inputs."""
        return self._here.index(True)

    @property
    def factor(self) -> float:
        """Factor that turns an average over all ranks into the required average."""
        return 1.0 if self._by_all else len(self._here) / sum(self._here)

    def rest(self) -> Iterator[None]:
        """Yield once for each step that other ranks still make, while this rank has no inputs."""
        before = self._here
        while self.step(False):
            before = self._here
            yield
        self._here = before
