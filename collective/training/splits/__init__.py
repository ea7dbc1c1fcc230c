"""Layers cut along the batch, the channels or the data axes, over ranks or in turn.

No framework and no transport is known here: :mod:`.windows` says which rows of its input a layer
needs for some rows of its output, :mod:`.blocks` what a graph of layers needs for a block of its
result; :mod:`.serial` and :mod:`.layered` compute it in turn and over ranks; :mod:`.filters` says
which weights a rank has where each has its own. :mod:`.cuts` runs a model, :mod:`.session` gets the
functions that it calls, and :mod:`.recipes` makes steps of them. What frameworks add is in
``collective.adapters.torch.splits`` and ``collective.adapters.chainer.splits``.
"""
