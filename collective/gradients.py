"""The engine that reduces gradients in buckets: see :mod:`collective.training.gradients`."""

from collective.training.gradients import Bucket, Gradients, Parameter

__all__ = ["Bucket", "Gradients", "Parameter"]
