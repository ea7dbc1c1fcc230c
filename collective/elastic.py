"""Training that goes on when ranks are lost: see :mod:`collective.training.elastic`."""

from collective.training.elastic import Generation, generations
from collective.training.elastic_state import Keeper, State, register

__all__ = ["Generation", "Keeper", "State", "generations", "register"]
