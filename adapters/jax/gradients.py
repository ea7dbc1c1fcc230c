"""Functions for data-parallel training: they make parameters and gradients equal on all ranks.

XLA returns all gradients of a compiled function at once. So there is no backward pass during which
:class:`collective.gradients.Gradients` could reduce the first ones. One call reduces all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import jax

from collective import InvalidArgumentError, premul_sum
from collective.inner import Op, comm_or_current

if TYPE_CHECKING:
    from collective import Communicator, ReduceOp


def average_gradients(
    grads: Any,
    comm: Communicator | None = None,
    *,
    weight: float | None = None,
    order: Literal["rank"] | None = None,
) -> Any:
    """Return the average of the ranks' gradients; call it outside ``jax.jit``.

    ::

        loss, grads = gradients_of(params, batch)    # jax.jit(jax.value_and_grad(...))
        grads = average_gradients(grads, comm)
        params, state = step(params, state, grads)   # jax.jit, with optax

    Gradients of the same dtype are sent in one message.

    Collective: every rank calls it, with gradients of the same structure.

    Args:
        grads: pytree of JAX arrays.
        comm: communicator that connects the ranks; None: the current communicator.
        weight: this rank's share in the average, such as the number of samples in its batch. The
            average is then that of all samples, also if the ranks' batches have different lengths.
            A rank without samples passes zeros as gradients, and weight 0. If a rank passes a
            weight, all must. None: all ranks have the same share.
        order: ``"rank"`` to sum in rank order: the same bits on every transport and in every run.

    Returns:
        A pytree of the same structure, with JAX arrays on the devices of ``grads``.

    Raises:
        MismatchError: the gradients differ between the ranks in number, shape or dtype, or only
            some ranks passed a weight.
        InvalidArgumentError: a weight is negative or not finite, or the sum of the weights is 0.
    """
    comm = comm_or_current(comm, "average_gradients")
    leaves, structure = jax.tree.flatten(grads)
    op: Op | ReduceOp = "avg"
    if weight is not None:
        op = premul_sum(_share(weight, comm))
    elif not leaves:
        return grads
    return jax.tree.unflatten(structure, comm.all_reduce(leaves, op=op, order=order))


def _share(weight: float, comm: Communicator) -> float:
    """Return this rank's weight divided by the sum of all ranks' weights."""
    # All ranks see all weights, so that they raise together.
    weights = comm.all_gather(float(weight))
    total = math.fsum(weights)
    if not (min(weights) >= 0 and 0 < total < math.inf):
        raise InvalidArgumentError(
            f"average_gradients: the ranks' weights are {weights} (expected finite numbers that "
            f"are not negative, and not all 0) [rank {comm.rank} of {comm.size}]. Pass the number "
            "of samples of this rank's batch."
        )
    return float(weight) / total


def broadcast_parameters(params: Any, comm: Communicator | None = None, root: int = 0) -> Any:
    """Return ``root``'s parameters, or its optimizer's state, on every rank.

    Collective: every rank calls it, with a pytree of the same structure.

    Args:
        params: pytree of JAX arrays and numbers.
        comm: communicator that connects the ranks; None: the current communicator.
        root: rank whose values all ranks get.

    Returns:
        A pytree of the same structure. On ``root`` its leaves are those of ``params``.

    Raises:
        MismatchError: the leaves differ between the ranks in number, shape or dtype.
    """
    comm = comm_or_current(comm, "broadcast_parameters")
    leaves, structure = jax.tree.flatten(params)
    if not leaves:
        return params
    return jax.tree.unflatten(structure, comm.broadcast(leaves, root=root))
