"""Elastic training, which continues when ranks are lost or join: see :mod:`collective.training`."""

from collective.training.elastic import Generation, generations
from collective.training.elastic_state import Keeper, State, register
from collective.training.preemption import PreemptedError

__all__ = ["Generation", "Keeper", "PreemptedError", "State", "generations", "register"]
