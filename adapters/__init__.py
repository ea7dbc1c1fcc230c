"""Adapters to array and deep-learning frameworks, one package each; imported lazily."""

from __future__ import annotations

if __name__ != "collective.adapters":
    # A second import of the same files under another name would create a second set of classes.
    raise ImportError(
        f"import {__name__}: this folder is part of the package collective. Import "
        "collective.adapters instead.",
        name=__name__,
    )
