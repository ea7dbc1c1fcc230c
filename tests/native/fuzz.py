"""Fuzzing of what others can send to a rank over ``tcp``, for a given time.

``python -m tests.native.fuzz --minutes 60`` takes turns with two kinds of peers:

* With the secret: ``frames_fuzz.c`` under ASan and UBSan, with a new seed in each turn. The frames
  go to the parser in C.
* Without the secret: strangers at a :class:`~collective.control.server.Server`, whose words are
  random, or parts and mutations of a handshake. None may become a peer.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from collective.control.link import Challenge, Link, Message, listen
from collective.control.server import Server
from tests.native.threads import build, run

# Calls of the program in C, and strangers, in each turn.
_CALLS, _STRANGERS = 20_000, 200


class _Nobody:
    """Handler of a server whose peers all know the key, so it should have none."""

    def __init__(self) -> None:
        self.over = False
        self.heard_of: list[Message] = []

    def turn(self) -> bool:
        return not self.over

    def pause(self) -> float:
        return 0.05

    def heard(self, link: Link, message: Message) -> None:
        self.heard_of.append(message)

    def gone(self, link: Link, why: str) -> None:
        pass


class _Strangers:
    """A server, and the strangers that talk to it.

    Attributes:
        problems: a line for each stranger that got in.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._nobody = _Nobody()
        listening, self._address = listen("127.0.0.1")
        self._server = Server(listening, b"k" * 32, self._nobody)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()

    def talk(self, dice: random.Random) -> None:
        """Let one stranger talk, which knows all of the protocol but the key."""
        host, port = self._address.split()
        connected = socket.create_connection((host, int(port)), 10.0)
        with connected as sock, contextlib.suppress(OSError):
            sock.settimeout(0.01)
            greeting = sock.recv(1000) if dice.random() < 0.9 else b""
            words = dice.choice((
                dice.randbytes(dice.choice((0, 1, 3, Challenge.length, 900, 200_000))),
                bytes(Challenge.length), greeting, greeting * 3,
                dice.randbytes(Challenge.length) + b'\0\0\0\x02{}',
            ))  # fmt: skip
            while words:
                part = dice.choice((1, len(words), len(words)))
                sock.sendall(words[:part])
                words = words[part:] if dice.random() < 0.95 else b""
            answer = sock.recv(1000) if dice.random() < 0.5 else b""
            expected = (b"", Challenge.refusal) if greeting else (answer[:0], answer)
            if answer not in expected:
                self.problems.append(f"an answer to a stranger: {answer[:80]!r}")
        if self._server.peers or self._nobody.heard_of:
            self.problems.append("a stranger got in")
        if not self._thread.is_alive():
            self.problems.append("the server's thread has ended")

    def close(self) -> None:
        self._nobody.over = True
        self._thread.join()


def main() -> int:
    """Fuzz for a time; print the number of calls and strangers, the seeds and the problems."""
    parser = argparse.ArgumentParser(description="Fuzz what others can send to a rank over tcp.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first turn")
    options = parser.parse_args()
    end, seed, problems = time.monotonic() + 60 * options.minutes, options.seed, 0
    strangers = _Strangers()
    with tempfile.TemporaryDirectory() as folder:
        program = build("frames", "address,undefined", Path(folder))
        if program is None:
            print("there is no compiler that has the sanitizers")
            return 2
        while time.monotonic() < end and not problems:
            receives = seed % 7 + 2
            shown = run([str(program)], receives, _CALLS, 0, seed)
            if shown != f"{_CALLS} calls of {receives} ranks\n":
                print(f"seed {seed}, {receives} receives: {shown}", flush=True)
                problems += 1
            dice = random.Random(seed)
            for _ in range(_STRANGERS):
                strangers.talk(dice)
            seed += 1
            if (seed - options.seed) % 10 == 0:
                _report(options.seed, seed)
    strangers.close()
    for line in strangers.problems[:10]:
        print(line)
    _report(options.seed, seed)
    return int(bool(problems or strangers.problems))


def _report(first: int, after: int) -> None:
    turns, spent = after - first, os.times()
    print(
        f"seeds {first} to {after - 1}: {turns * _CALLS:,} calls of frames, {turns * _STRANGERS:,} "
        f"strangers; processor time {spent.children_user + spent.children_system:.0f} s and "
        f"{spent.user + spent.system:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
