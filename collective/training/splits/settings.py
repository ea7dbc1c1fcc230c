"""Options of ``Split``, and their checks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collective.errors import InvalidArgumentError

__all__ = ["Settings"]

# Values of the options that need ranks; the first value is the default.
_CHOICES = {
    # Whether rows travel before each layer, or once for a chain of layers.
    "halo": ("layer", "chain"),
    # Whether an input or a result is whole on each rank, or in pieces.
    "inputs": ("whole", "pieces"),
    "outputs": ("whole", "pieces"),
    # Whether each rank keeps the filters of all channels, or only of its own channels.
    "filters": ("all", "own"),
}


@dataclass(frozen=True)
class Settings:
    """How a model is split; see :class:`collective.adapters.torch.splits.Split`."""

    batch: int
    channels: int
    data: Sequence[int]
    recompute: bool
    halo: str
    inputs: str
    outputs: str
    filters: str
    strict: bool
    broadcast: bool

    def check(self, has_ranks: bool) -> None:
        """Check the options, separately and in combination.

        Args:
            has_ranks: whether the pieces are for ranks, and not computed in turn on one device.

        Raises:
            InvalidArgumentError: a number of pieces is no positive integer, ``data`` is no sequence
                of positive integers, an option has an unknown value or needs ranks, channels are
                cut with ``halo="chain"``, or ``filters="own"`` is used without a cut of the
                channels.
        """
        self._check_parts()
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise InvalidArgumentError(
                    f"Split: {name}={value!r} (expected one of {', '.join(known)})."
                )
            if not has_ranks and value != known[0]:
                raise InvalidArgumentError(
                    f"Split: {name}={value!r} without comm, but this option is for ranks. Pass "
                    "comm=."
                )
        if self.halo == "chain" and self.channels > 1:
            raise InvalidArgumentError(
                f"Split: channels={self.channels} with halo='chain', but a chain has many layers, "
                "and they mix channels. Use halo='layer'."
            )
        if self.filters == "own" and self.channels == 1:
            raise InvalidArgumentError(
                "Split: filters='own' with channels=1, but a rank's own filters are the filters of "
                "its channels. Pass channels= as well."
            )

    def _check_parts(self) -> None:
        for name, value in (("batch", self.batch), ("channels", self.channels)):
            if not _is_count(value):
                raise InvalidArgumentError(
                    f"Split: {name}={value!r}, expected a positive integer: the number of pieces."
                )
        try:
            counts = list(self.data)
        except TypeError:
            counts = []
        if not counts or not all(map(_is_count, counts)):
            example = f"data=({self.data},)" if _is_count(self.data) else "data=(4, 2)"
            raise InvalidArgumentError(
                f"Split: data={self.data!r}, expected a sequence of positive integers: the number "
                f"of pieces of each data axis. For example, pass {example}."
            )


def _is_count(value: Any) -> bool:
    """Return whether a value is a positive integer; True and False do not count."""
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False
