"""Calls that find others under way on their communicator."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

from collective.contract.work import Work


@contextlib.contextmanager
def behind_another(comm: Any) -> Iterator[set[CodeType]]:
    """Have the call in the body wait for one that is under way; yield what it runs in its thread.

    The other is over as soon as the call in the body has queued up.
    """
    over = threading.Event()
    seen: set[CodeType] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)
            if frame.f_code is Work.wait.__code__:
                over.set()

    comm._lane.submit("another", over.wait)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        over.set()
    assert Work.wait.__code__ in seen, "the test is void: the call did not wait for another"
