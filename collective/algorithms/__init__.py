"""Every collective operation over send and recv alone.

A transport uses these algorithms unless it overrides the methods of
:class:`collective.contract.backend.Backend`. :mod:`~collective.algorithms.moves` has the
operations that move data, :mod:`~collective.algorithms.reductions` those that fold, and
:mod:`~collective.algorithms.agreement` those without data. The choice between algorithms is in
:mod:`~collective.algorithms.costs`. Sending and receiving is in
:mod:`~collective.algorithms.messages`, folding in :mod:`~collective.algorithms.folds`, and cutting
buffers into pieces in :mod:`~collective.algorithms.pieces`. :mod:`~collective.algorithms.schedules`
records an algorithm once, for transports that replay its steps.

No algorithm writes to an input that is not also the output. All steps of a call share one deadline.
Scratch memory does not grow with the message, except where a function says so.
"""
