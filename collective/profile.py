"""Marks that a program sets for ``collective profile``."""

from collective.tools.profile import step

__all__ = ["step"]
