"""What a client's program leaves for the test: weights and metrics, and what they came over."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["options", "save"]


def options(description: str) -> argparse.Namespace:
    """Read the command line: the backend's name, and the folder for what the program found."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--backend", default="collective")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def save(folder: Path, **found: Any) -> None:
    """Write what this rank found, while the group is there."""
    group: Any = dist.group.WORLD
    comm = getattr(group, "comm", None)
    found["over"] = dist.get_backend() if comm is None else comm.backend
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")
