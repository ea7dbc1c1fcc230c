"""Elastic training, which continues when ranks are lost or join, and its protocol.

Users import :func:`generations` and :class:`State` from here; both are defined in
:mod:`collective.training`. The modules of this package are the protocol below them: ranks agree
on the ranks that continue (:mod:`.next_generation`), and processes join (:mod:`.arrivals`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.lazy import on_demand

if TYPE_CHECKING:
    from collective.training.elastic import Generation, generations
    from collective.training.elastic_state import Keeper, State, register
    from collective.training.preemption import PreemptedError
else:  # a type checker would conclude from __getattr__ that the package has every name
    # On demand, because the training modules import communicators, and communicators import the
    # protocol in this package.
    __getattr__, __dir__ = on_demand(
        __name__,
        {
            "Generation": ".training.elastic",
            "Keeper": ".training.elastic_state",
            "PreemptedError": ".training.preemption",
            "State": ".training.elastic_state",
            "generations": ".training.elastic",
            "register": ".training.elastic_state",
        },
    )

__all__ = ["Generation", "Keeper", "PreemptedError", "State", "generations", "register"]
