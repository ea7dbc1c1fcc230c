"""Every collective operation over nothing but send and recv, one operation a module.

A transport gets them by leaving the methods of :class:`collective.contract.backend.Backend` as
they are. The choice between algorithms is in :mod:`~collective.algorithms.costs`; how
they send in :mod:`~collective.algorithms.messages`, how they fold in
:mod:`~collective.algorithms.folds`, how they cut in
:mod:`~collective.algorithms.pieces`.

None of them writes to an input that is not the output, all keep one deadline, and
scratch memory does not grow with the message except where a function says so.
"""
