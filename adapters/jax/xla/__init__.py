"""Plug-in for XLA: unmodified JAX programs on CPUs over the transports of ``collective``.

XLA carries the calls of ``psum``, ``pjit`` and ``shard_map`` between CPUs by an MPI library that it
loads at run time. This package has such a library. Its functions are calls of a communicator. Start
a program with ``collective run --jax``, or set the variables that ``python -m
collective.adapters.jax.xla`` prints and use any launcher.
"""

from __future__ import annotations

from .library import enable, library, variables

__all__ = ["enable", "library", "variables"]
