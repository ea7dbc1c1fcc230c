"""State of a split link that all ranks have in common."""

from __future__ import annotations

from typing import Any

from collective.adapters.chainer.state import distinct_parameters, persistent_values
from collective.training.splits.filters import Filters
from collective.training.splits.replicas import StateEntry

__all__ = ["state_of"]


def state_of(link: Any, filters: Filters | None) -> list[StateEntry]:
    """Return a link's parameters and persistent values, each once.

    Args:
        link: link that is split.
        filters: record of the parameters of which this rank has a piece; None: there are none.
    """
    parameters = [
        StateEntry(
            name,
            parameter.array,
            parameter.requires_grad,
            None if filters is None else filters.piece(parameter),
        )
        for name, parameter in distinct_parameters(link)
    ]
    values = [StateEntry(p, vars(child)[name]) for p, child, name in persistent_values(link)]
    return parameters + values
