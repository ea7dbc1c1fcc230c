"""The transports, each a module or package; :mod:`collective.contract.registry` has their names."""

from __future__ import annotations

if __name__ != "collective.backends":
    # A second import of the same files would make a second Backend class.
    raise ImportError(
        f"import {__name__}: this folder is part of the package collective. Import "
        "collective.backends instead.",
        name=__name__,
    )
