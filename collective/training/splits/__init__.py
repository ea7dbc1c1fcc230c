"""Layers cut along the batch, the channels or the data axes, over ranks or in turn.

The package is independent of frameworks and transports. :mod:`.windows` computes which rows of its
input a layer needs for some rows of its output. :mod:`.blocks` computes what a graph of layers
needs for a block of its result. :mod:`.serial` computes a graph in turn, and :mod:`.segments`
chooses which of its layers are computed some channels at a time. :mod:`.layered` computes a graph
over ranks, by exchanges between them. :mod:`collective.training.replicas` compares the ranks'
models and inputs, and :mod:`.filters` records which weights a rank has if each rank has its own.
:mod:`.cuts` runs a model by the options of ``Split``, :mod:`.session` intercepts the functions that
the model calls, and :mod:`.recipes` and :mod:`.weighted` turn these calls into steps. The parts for
each framework are in ``collective.adapters.torch.splits`` and
``collective.adapters.chainer.splits``.
"""
