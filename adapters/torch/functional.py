"""Collectives that PyTorch differentiates: the backward pass of each is its adjoint collective.

``x_r``, ``y_r`` and ``L_r`` are the input, result and loss of rank ``r``. PyTorch differentiates
``L = Σ_r L_r``, and ``g_r = ∂L/∂y_r``. Each docstring gives ``∂L/∂x_r``.

- Every rank's result has to contribute to its loss. Otherwise that rank does not take part in the
  backward collective, and the other ranks wait for it. A call without a result on a rank
  (:func:`send`; :func:`reduce` and :func:`gather` off the root) returns a *delegate* there: a zero
  without dimensions, which has to be added to the loss.
- Results depend on other ranks' tensors. So if gradients are enabled, results require a gradient
  on every rank, whether ``x`` does or not. A rank with a frozen ``x`` takes part as well.
- Backward collectives run in the reverse order of the forward calls. So all ranks have to make the
  forward calls in the same order. Among the nodes that are ready, autograd runs the node that was
  created last. A node is created after the nodes that it depends on. So on one device the backward
  order is the reverse order of creation, however the results are combined later.
- ``backward()`` visits every node. ``torch.autograd.grad(loss, inputs)`` visits only the nodes that
  lead to ``inputs``. So on each rank, an input of the collective has to be among ``inputs`` or
  depend on them.
- Backward passes consist of these same functions. So derivatives of any order are available.
"""

from __future__ import annotations

from .tape import Tape

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scatter", "send",
]  # fmt: skip

_calls = Tape()
all_gather = _calls.all_gather
all_reduce = _calls.all_reduce
all_to_all = _calls.all_to_all
broadcast = _calls.broadcast
gather = _calls.gather
recv = _calls.recv
reduce = _calls.reduce
reduce_scatter = _calls.reduce_scatter
scatter = _calls.scatter
send = _calls.send
