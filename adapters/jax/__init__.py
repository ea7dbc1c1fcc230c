"""Adapter for JAX: its arrays as arrays of ``collective``, and data-parallel training.

:mod:`collective.adapters.jax.functional` has the calls for functions that JAX compiles.

Each exported name is imported at its first use, and JAX with it. A program that enables
:mod:`collective.adapters.jax.xla`, which runs unmodified JAX programs, does so before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.inner import on_demand as _on_demand

if TYPE_CHECKING:
    from .gradients import average_gradients, broadcast_parameters
else:  # for a type checker, a __getattr__ would mean that the module has every name
    __getattr__, __dir__ = _on_demand(
        __name__, {"gradients": "average_gradients broadcast_parameters"}
    )

__all__ = ["average_gradients", "broadcast_parameters"]
