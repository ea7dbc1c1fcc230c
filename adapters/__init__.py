"""The adapters to array and deep-learning frameworks, one package each; imported lazily."""

from __future__ import annotations

if __name__ != "collective.adapters":
    # A second import of the same files would make a second set of classes.
    raise ImportError(
        f"import {__name__}: the folder is part of the package collective; "
        "import collective.adapters instead",
        name=__name__,
    )
