"""Messages of bytes for adapters, over an engine that the test makes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from collective.backends.inbox import Transfer
from collective.communicator.mail import Mail
from collective.native import NOBODY


class _Engine:
    """Engine whose wait asks again after it has heard yes, as one does that has napped."""

    send = receive = None

    def __init__(self) -> None:
        self.messages = [None, Transfer(None, 1, NOBODY, 7)]

    def find(self, source: int, tag: int, mask: int, take: bool) -> Transfer | None:
        return self.messages.pop(0)

    def wait_until(self, ready: Callable[[], bool], *_: Any) -> None:
        assert ready()
        assert ready()


def test_matched_probe_takes_one_message_however_often_the_wait_asks() -> None:
    path: Any = SimpleNamespace(size=2, rank=0, timeout=1.0, who="[rank 0 of 2]")
    engine: Any = _Engine()
    assert Mail(path, engine).match(1, 7).tag == 7
    assert not engine.messages


def test_places_and_bits_are_what_the_engine_gets() -> None:
    calls: list[Any] = []
    path: Any = SimpleNamespace(size=4, rank=2, timeout=1.0, who="[rank 2 of 4]")
    engine: Any = SimpleNamespace(send=lambda *call: calls.append(call), receive=None)
    mail = Mail(path, engine, 5, [3, 2])
    mail.send(b"x", 0, 7)
    mail.send(b"y", 1, 7, answer=True)
    bits = mail.bits | 7
    assert calls == [(b"x", mail.places[0], bits), (b"y", mail.places[1], bits | mail.WANTS_ANSWER)]
