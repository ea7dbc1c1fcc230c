"""Transport over shared memory in each host and another transport between hosts.

See ``docs/hierarchical.md``.
"""

from __future__ import annotations

from .transport import HierarchicalBackend

__all__ = ["HierarchicalBackend"]
