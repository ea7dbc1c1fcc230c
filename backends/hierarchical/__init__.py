"""Shared memory inside each host, another transport between the hosts: ``docs/hierarchical.md``."""

from __future__ import annotations

from .transport import HierarchicalBackend

__all__ = ["HierarchicalBackend"]
