"""Training on uneven inputs: ranks that have run out take part with zeros until all have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from collective.errors import GradientError

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["Attendance"]


class Attendance:
    """Who still has inputs.

    Args:
        comm: connects the ranks.
        by_all: whether averages are over all ranks, whoever is there; else over those.
    """

    def __init__(self, comm: Communicator, by_all: bool) -> None:
        self._comm = comm
        self._by_all = by_all
        self._here = [True] * comm.size
        self._due = False  # whether gradients are expected of this rank in this step

    def forward(self) -> None:
        """Take part in a step, of which there will be gradients.

        Collective: every rank calls it, or is in :meth:`rest`.

        Raises:
            GradientError: there were none in the step before.
        """
        self.leave()
        self.step(True)
        self._due = True

    def backward(self) -> None:
        """Take note that the gradients of this step are about to be reduced.

        Raises:
            GradientError: they were before.
        """
        if not self._due:
            raise self._error("a second backward pass reduces gradients of one step")
        self._due = False

    def leave(self) -> None:
        """Take note that this step is over.

        Raises:
            GradientError: there were no gradients in it.
        """
        if self._due:
            raise self._error("a forward pass has had no backward pass")

    def _error(self, what: str) -> GradientError:
        # The ranks that are through take part in one reduction a forward pass.
        return GradientError(
            f"join: {what} [rank {self._comm.rank} of {self._comm.size}]. Inside of join() each "
            "forward pass has one backward pass, before the next forward pass; but for those "
            "within no_sync() or torch.no_grad()."
        )

    def step(self, here: bool) -> bool:
        """Tell whether this rank has inputs for a step; return whether any rank has.

        Collective: every rank calls it.
        """
        self._here = self._comm.all_gather_object(here)
        return any(self._here)

    @property
    def root(self) -> int:
        """A rank that has inputs in this step; the last of them once none is left."""
        return self._here.index(True)

    @property
    def factor(self) -> float:
        """What an average over all ranks has to be multiplied with."""
        return 1.0 if self._by_all else len(self._here) / sum(self._here)

    def rest(self) -> Iterator[None]:
        """Yield once for each step that other ranks still make; this one has none left."""
        before = self._here
        while self.step(False):
            before = self._here
            yield
        self._here = before
