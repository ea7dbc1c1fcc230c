"""What a store keeps that a process serves to ranks who have proved that they know a key."""

from __future__ import annotations

from .link import Link, Message

__all__ = ["Values"]


class Values:
    """The service of a :class:`.server.Server`: keys and their values, as hexadecimal text."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def turn(self) -> bool:
        """Go on: whoever has it closes the socket."""
        return True

    def pause(self) -> float | None:
        """Return None: it does nothing by itself."""
        return None

    def heard(self, link: Link, message: Message) -> None:
        """Answer a question.

        Raises:
            ValueError: it is none.
        """
        kind, key, number = message["kind"], message["key"], message["number"]
        if not isinstance(key, str) or type(number) is not int:
            raise ValueError("a key that is no text, or a number that is none")
        value = None
        if kind == "set":
            bytes.fromhex(message["value"])
            self.values[key] = message["value"]
        elif kind == "put":  # in one thread, so that one is first
            bytes.fromhex(message["value"])
            value = self.values.setdefault(key, message["value"])
        elif kind == "get":
            value = self.values.get(key)
        elif kind == "delete":
            self.values.pop(key, None)
        else:
            raise ValueError(f"a question of kind {kind!r:.40}")
        link.send({"number": number, "value": value})

    def gone(self, link: Link, why: str) -> None:
        """Do nothing: it comes again, or its job fails."""
