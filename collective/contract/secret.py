"""What the ranks of a job know and nobody else, and the keys that follow from it.

The secret itself never travels, and no key does: both sides of a connection derive the same one
(HKDF, RFC 5869, with HMAC-SHA256), each for one purpose in one job.
"""

from __future__ import annotations

import hmac
import os
from typing import Any, NoReturn

__all__ = ["LEAST_BYTES", "REMEDY", "Secret", "hkdf", "parse"]

#: What to do about a missing secret, for error texts and warnings.
REMEDY = (
    "Give all ranks one secret: a file of mode 0600 named by COLLECTIVE_SECRET_FILE, made with "
    "`openssl rand -hex 32` (or its text as COLLECTIVE_SECRET)"
)

_HASH_BYTES = 32
#: Whoever records a handshake can try out secrets at leisure: no word that a person thinks of.
LEAST_BYTES = 16
_SALT = b"collective 1"


class Secret:
    """A secret, which shows itself to nobody: not as text, not in a pickle.

    Args:
        value: the bytes, at random.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def key(self, purpose: str) -> bytes:
        """Return 32 bytes for one purpose, of which nothing follows about any other's."""
        return hkdf(self._value, _SALT, _joined("key", purpose), _HASH_BYTES)

    def within(self, *names: str) -> Secret:
        """Return the secret of what is named by ``names``: a job, one of its meetings."""
        return Secret(hkdf(self._value, _SALT, _joined("within", *names), _HASH_BYTES))

    def __repr__(self) -> str:
        return "<secret>"

    def __str__(self) -> str:
        return "set"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled; the environment hands it on, or a file does")


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """Return ``length`` bytes that follow from ``secret``: HKDF-SHA256, RFC 5869, section 2.

    Args:
        secret: the input keying material.
        salt: public, the same for all uses of the secret.
        info: public, what these bytes are for.
        length: at most 8,160.
    """
    extracted = hmac.digest(salt, secret, "sha256")
    block, found = b"", b""
    for number in range(1, -(-length // _HASH_BYTES) + 1):
        block = hmac.digest(extracted, block + info + bytes([number]), "sha256")
        found += block
    return found[:length]


def _joined(*names: str) -> bytes:
    """Return ``names`` as bytes that no other names have."""
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    return b"".join(len(each).to_bytes(4, "big") + each for each in encoded)


def parse(value: Any) -> Secret:
    """Return the secret that a setting gives.

    Raises:
        TypeError, ValueError: it is no text or bytes, or too short.
    """
    if isinstance(value, Secret):
        return value
    found = os.fsencode(value) if isinstance(value, str) else value
    if not isinstance(found, bytes):
        raise TypeError
    if len(found) < LEAST_BYTES:
        raise ValueError
    return Secret(found)
