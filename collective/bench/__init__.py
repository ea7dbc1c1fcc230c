"""Measuring: operations of our transports and of other libraries, in turns.

:mod:`~collective.bench.run` is what ``collective bench`` does;
:mod:`~collective.bench.arena` starts the contestants and :mod:`~collective.bench.measure` times
them, each as :mod:`~collective.bench.contestants` and :mod:`~collective.bench.libraries` say.
"""
