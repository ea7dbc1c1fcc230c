"""Transport between ranks on any hosts, over PyTorch's Gloo (torch's C++ ``ProcessGroupGloo``).

The transport never calls ``torch.distributed.init_process_group``, so it does not touch a
program's own process groups. Gloo carries messages, and all collectives are made of these
(:mod:`collective.algorithms`). See ``docs/gloo.md``.
"""

from __future__ import annotations

from .transport import GlooBackend

__all__ = ["GlooBackend"]
