"""Decorator that keeps ``torch.compile`` from compiling a class."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

_frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Make the methods of a class, and all functions that they call, run without compilation.

    C++ code between two compiled pieces of a program calls these methods, for example when DDP
    broadcasts buffers. The compiler would compile each of them. ``torch.compiler.disable`` has the
    same effect, but it imports the compiler, which takes seconds, even in programs that do not use
    the compiler.
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
