"""Keeps ``torch.compile`` out of what is not to be compiled."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

__all__ = ["untraced"]

_frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Have the methods of a class, and all that they call, run as they are.

    What is C++ between two compiled pieces of a program calls them, as where DDP broadcasts
    buffers, and the compiler would take up each. ``torch.compiler.disable`` does the same, and
    imports the compiler, which takes seconds, for programs that do not use it.
    """
    for member in vars(cls).values():
        code = getattr(getattr(member, "fget", None) or member, "__code__", None)
        if code is not None:
            _skip(code)
    return cls


def _skip(code: Any) -> None:
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    elif hasattr(_frames, "skip_code"):  # before torch 2.7
        _frames.skip_code(code)
