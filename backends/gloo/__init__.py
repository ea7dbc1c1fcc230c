"""Ranks on any hosts, over PyTorch's Gloo: torch's C++ ``ProcessGroupGloo``, used directly.

Nothing goes through ``torch.distributed.init_process_group``: a program's own process groups
are left alone. ``docs/gloo.md`` tells what is asked of Gloo and what of our algorithms.
"""

from __future__ import annotations

from .transport import GlooBackend

__all__ = ["GlooBackend"]
