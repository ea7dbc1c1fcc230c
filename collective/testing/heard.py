"""What a rank hears of another's failure: which error, with which words, and when."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from collective.errors import CollectiveError

__all__ = ["Heard", "Trouble", "hold", "listen"]

# The promise is two seconds; the rest is what a busy machine may add. Together less than a call's
# deadline, at which another error is heard.
_PROMISED_S = 2.0
_NOISE_S = 8.0


class Trouble(Exception):
    """What a rank's own code raises, where the others are to hear of it."""


@dataclass
class Heard:
    """What a rank heard: the error, and how many seconds it waited for it."""

    error: CollectiveError
    seconds: float


def listen(call: Callable[[], Any], *, once: bool = False) -> Heard:
    """Repeat ``call`` until it raises one of our errors.

    Args:
        call: a call that a rank which is gone would have to take part in.
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
            raise AssertionError("a call returned that a rank which is gone had no part in")


def hold(
    heard: Any, kind: type[CollectiveError], what: str, *words: str, rank: int | None = None
) -> None:
    """Hold that a rank heard an error of ``kind``, in time, that has ``words`` and ``rank``.

    Raises:
        AssertionError: it did not.
    """
    if not isinstance(heard, Heard):
        raise AssertionError(f"{what}: got {heard!r} instead of {kind.__name__}")
    if not isinstance(heard.error, kind):
        raise AssertionError(
            f"{what}: heard {type(heard.error).__name__} instead of {kind.__name__}: {heard.error}"
        )
    if heard.seconds > _PROMISED_S + _NOISE_S:
        raise AssertionError(f"{what}: heard of it after {heard.seconds:.1f} s; promised: 2 s")
    for word in words:
        if word not in str(heard.error):
            raise AssertionError(f"{what}: the error does not tell {word!r}: {heard.error}")
    if rank is not None and not re.search(rf"\branks? [\d, ]*\b{rank}\b", str(heard.error)):
        raise AssertionError(f"{what}: the error does not name rank {rank}: {heard.error}")
