"""Every collective operation over send and recv alone, one operation a module.

A transport uses these algorithms unless it overrides the methods of
:class:`collective.contract.backend.Backend`. The choice between algorithms is in
:mod:`~collective.algorithms.costs`. Sending and receiving is in
:mod:`~collective.algorithms.messages`, folding in :mod:`~collective.algorithms.folds`, and cutting
buffers into pieces in :mod:`~collective.algorithms.pieces`.

No algorithm writes to an input that is not also the output. All steps of a call share one deadline.
Scratch memory does not grow with the message, except where a function says so.
"""
