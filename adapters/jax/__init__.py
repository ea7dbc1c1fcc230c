"""Adapter for JAX: XLA's collective calls on CPUs over the transports of ``collective``.

:mod:`collective.adapters.jax.xla` runs unmodified JAX programs.
"""
