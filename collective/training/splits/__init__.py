"""Layers cut along the batch, the channels or the data axes, over ranks or in turn.

No framework and no transport is known here. :mod:`.windows` computes which rows of its input a
layer needs for some rows of its output, and :mod:`.blocks` what a graph of layers needs for a block
of its result. :mod:`.serial` computes a graph in turn, :mod:`.segments` chooses which of its layers
go some channels at a time, and :mod:`.layered` computes it over ranks. :mod:`.replicas` compares
what the ranks have, and :mod:`.filters` knows which weights a rank has where each has its own.
:mod:`.cuts` runs a model by its :mod:`.settings`, :mod:`.session` gets the functions that it calls,
and :mod:`.recipes` and :mod:`.weighted` make steps of them. What frameworks add is in
``collective.adapters.torch.splits`` and ``collective.adapters.chainer.splits``.
"""
