"""What all ranks have alike of a link that is split."""

from __future__ import annotations

from typing import Any

from collective.adapters.chainer.state import distinct_parameters, persistent_values
from collective.training.splits.filters import Filters
from collective.training.splits.replicas import StateEntry

__all__ = ["state_of"]


def state_of(link: Any, filters: Filters | None) -> list[StateEntry]:
    """Return a link's parameters and persistent values, each once.

    Args:
        link: the one that is split.
        filters: which parameters this rank has a piece of; None: none.
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
