"""Measurements of operations, of our transports and of other libraries, in turns.

:mod:`.run` is the work of ``collective bench``. :mod:`.arena` starts the contestants, which
:mod:`.contestants` and :mod:`.libraries` describe, and :mod:`.measure` times them.
"""
