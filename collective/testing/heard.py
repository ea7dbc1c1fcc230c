"""The error that a rank gets when another rank fails: its class, its words, and when it comes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from collective import CollectiveError

# The promise is two seconds. The rest is a margin for a busy machine. Together they are less than a
# call's deadline, at which the call would raise another error.
_PROMISED_S = 2.0
_NOISE_S = 8.0


class Trouble(Exception):
    """Exception that a rank's own code raises, so that the other ranks get an error."""


@dataclass
class Heard:
    """The error that a rank got, and how many seconds it waited for the error."""

    error: CollectiveError
    seconds: float


def listen(call: Callable[[], Any], *, once: bool = False) -> Heard:
    """Repeat ``call`` until it raises a CollectiveError, and return that error.

    Args:
        call: a call in which a rank that is gone would have to take part.
        once: if true, the first call has to raise.

    Raises:
        AssertionError: the first call had to raise and returned.
    """
    while True:
        since = time.monotonic()
        try:
            call()
        except CollectiveError as error:
            return Heard(error, time.monotonic() - since)
        if once:
            raise AssertionError("a call returned although a rank that is gone did not take part")


def hold(
    heard: Any, kind: type[CollectiveError], what: str, *words: str, rank: int | None = None
) -> None:
    """Check that a rank got an error of ``kind``, in time, with ``words`` and ``rank`` in its text.

    Raises:
        AssertionError: the rank did not.
    """
    if not isinstance(heard, Heard):
        raise AssertionError(f"{what}: got {heard!r} instead of {kind.__name__}")
    if not isinstance(heard.error, kind):
        raise AssertionError(
            f"{what}: got {type(heard.error).__name__} instead of {kind.__name__}: {heard.error}"
        )
    if heard.seconds > _PROMISED_S + _NOISE_S:
        raise AssertionError(f"{what}: got the error after {heard.seconds:.1f} s; promised: 2 s")
    for word in words:
        if word not in str(heard.error):
            raise AssertionError(f"{what}: the error does not contain {word!r}: {heard.error}")
    if rank is not None and not re.search(rf"\branks? [\d, ]*\b{rank}\b", str(heard.error)):
        raise AssertionError(f"{what}: the error does not name rank {rank}: {heard.error}")
