"""Measuring: operations of our transports and of other libraries, in turns.

:mod:`.run` is what ``collective bench`` does; :mod:`.arena` starts the contestants and
:mod:`.measure` times them, each as :mod:`.contestants` and :mod:`.libraries` say.
"""
