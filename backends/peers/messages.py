"""The messages between the ranks and the hub: each kind of message, and its fields.

The sender of a message knows the job's key, but it may run another version, or be broken. A message
that differs from the tables here ends the sender's connection, and no part of it takes effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from collective.contract.waits import Waiting

from .link import Message

__all__ = ["ENROLMENT", "FROM_HUB", "FROM_RANKS", "check"]

_Test = Callable[[Any], bool]


def _integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _count(value: Any) -> bool:
    return _integer(value) and value >= 0


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _list_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _or_none(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _with(**tests: _Test) -> _Test:
    def test(value: Any) -> bool:
        return isinstance(value, dict) and all(k in value and t(value[k]) for k, t in tests.items())

    return test


_ranks = _list_of(_count)
_failure = _with(kind=_text, rank=_integer, text=_text, ranks=_ranks)
# The description of a call, from collective.request.Request.header().
_header = _with(
    operation=_text, dtype=_or_none(_text), shape=_or_none(_list_of(_integer)),
    options=lambda value: isinstance(value, dict), site=_text,
)  # fmt: skip


def _entry(value: Any) -> bool:
    # The sequence number, the digest, whether the call is still a comparison, and its header.
    tests = (_count, _integer, _flag, _header)
    return (
        isinstance(value, list)
        and len(value) == len(tests)
        and all(test(part) for test, part in zip(tests, value))
    )


# The failure, and the number of calls that the sender had finished; None if the sender is not in
# a call.
_broken = {"failure": _failure, "finished": _or_none(_integer)}
_left = {"finished": _integer, "dropped": _flag, "last": _text}
_report = {
    "entries": _list_of(_entry), "finished": _integer, "started": _count,
    "waits": _list_of(lambda value: Waiting.read(value) is not None),
}  # fmt: skip


_note = _with(
    name=_text, number=_count, header=_header, made=_text, beat=_count,
    begun=lambda value: isinstance(value, dict) and all(map(_count, value.values())),
)  # fmt: skip


def _by_rank(test: _Test) -> _Test:
    return lambda value: (
        isinstance(value, dict) and all(r.isdecimal() and test(value[r]) for r in value)
    )


#: The first message of a rank.
ENROLMENT: Mapping[str, Mapping[str, _Test]] = {
    "here": {"rank": _count, "size": _count, "host": _text},
}
#: Later messages of a rank.
FROM_RANKS: Mapping[str, Mapping[str, _Test]] = {
    "bye": {},
    "failure": {"channel": _text, "members": _ranks, **_broken},
    "heard": {"channel": _text, "members": _ranks},
    "left": {"channel": _text, "members": _ranks, **_left},
    "stall": {"channel": _text, "members": _ranks, "asks": _or_none(_ranks)},
    "report": {"channel": _text, **_report},
    "waits": {"channel": _text, "members": _ranks, "note": _note},
    "offer": {"channel": _text, "members": _ranks, "name": _text, "text": _text},
}
#: Messages of the hub.
FROM_HUB: Mapping[str, Mapping[str, _Test]] = {
    "complete": {"hosts": _list_of(_text), "session": _text},
    "refused": {"why": _text},
    "failure": {"channel": _text, **_broken},
    "heard": {"channel": _text, "rank": _count},
    "left": {"channel": _text, "rank": _count, **_left},
    "report": {"channel": _text},
    "late": {"channel": _text, "late": _by_rank(_or_none(_with(**_report)))},
    "offers": {"channel": _text, "name": _text, "texts": _by_rank(_text)},
    "lost": {"rank": _count, "why": _text},
}


def check(message: Message, kinds: Mapping[str, Mapping[str, _Test]]) -> str:
    """Check that ``message`` is of one of ``kinds`` and has its fields; return its kind.

    Raises:
        ValueError: the kind is another one, or a field is missing or of another type.
    """
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"a message of kind {kind!r:.40}; it must be one of {', '.join(kinds)}")
    for name, test in kinds[kind].items():
        if name not in message:
            raise ValueError(f"a message of kind {kind!r} without {name!r}")
        if not test(message[name]):
            raise ValueError(f"a message of kind {kind!r} with {name} {message[name]!r:.40}")
    return kind
