"""Training that goes on when ranks are lost or join, and the protocol by which ranks do so.

Users import :func:`generations` and :class:`State` from here; both stand in
:mod:`collective.training`. The modules of this package are the protocol below them: ranks agree
which of them go on (:mod:`.next_generation`), and processes join (:mod:`.arrivals`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.lazy import on_demand

if TYPE_CHECKING:
    from collective.training.elastic import Generation, generations
    from collective.training.elastic_state import Keeper, State, register
else:  # to a type checker it would mean that there is any name
    # On demand, because training stands on communicators, and these on the protocol in here.
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "Generation": ".training.elastic",
            "Keeper": ".training.elastic_state",
            "State": ".training.elastic_state",
            "generations": ".training.elastic",
            "register": ".training.elastic_state",
        },
    )

__all__ = ["Generation", "Keeper", "State", "generations", "register"]
