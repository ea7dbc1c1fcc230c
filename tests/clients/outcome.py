"""The command line and the result file of a client's program.

The programs in this folder use it to hand weights, metrics and the transport's name to the test.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["options", "save"]


def options(description: str) -> argparse.Namespace:
    """Parse the command line: the backend's name, and the folder for the results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--backend", default="collective")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def save(folder: Path, **results: Any) -> None:
    """Write this rank's results, and the transport's name, while the process group exists."""
    group: Any = dist.group.WORLD
    comm = getattr(group, "comm", None)
    results["over"] = dist.get_backend() if comm is None else comm.backend
    torch.save(results, folder / f"rank-{dist.get_rank()}.pt")
