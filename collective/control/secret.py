"""Secret that only the ranks of a job know, and the keys derived from it.

Neither the secret nor a key is ever sent. Both sides of a connection derive the same key from the
secret (HKDF, RFC 5869, with HMAC-SHA256). Each key serves one purpose in one job.
"""

from __future__ import annotations

import hmac
import os
from typing import Any, NoReturn

#: Remedy for a missing secret, for error texts and warnings.
REMEDY = (
    "Give all ranks one secret: COLLECTIVE_SECRET=file:PATH of a file of mode 0600, made with "
    "`openssl rand -hex 32` (or its text instead of file:PATH)"
)

#: How to find out whether two hosts have one secret, for error texts.
COMPARE = "Compare `sha256sum` of the file in COLLECTIVE_SECRET on both hosts"

_HASH_BYTES = 32
#: Minimum length of a secret. An attacker who records a handshake can try out secrets offline, so
#: the secret must not be a word that a person thinks of.
LEAST_BYTES = 16
_SALT = b"collective 1"


class Secret:
    """Secret of a job, which is never shown as text and never pickled.

    Args:
        value: random bytes.
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def key(self, purpose: str) -> bytes:
        """Return a key of 32 bytes for one purpose, which reveals nothing about other keys."""
        return hkdf(self._value, _SALT, _joined("key", purpose), _HASH_BYTES)

    def within(self, *names: str) -> Secret:
        """Return the secret of a part named by ``names``, such as a job or one of its meetings."""
        return Secret(hkdf(self._value, _SALT, _joined("within", *names), _HASH_BYTES))

    def __repr__(self) -> str:
        return "<secret>"

    def __str__(self) -> str:
        return "set"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled; pass it on in the environment or in a file")


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """Derive ``length`` bytes from ``secret``: HKDF-SHA256, RFC 5869, section 2.

    Args:
        secret: the input keying material.
        salt: public bytes, the same for all uses of the secret.
        info: public bytes that name the purpose of the result.
        length: number of bytes, at most 8,160.
    """
    extracted = hmac.digest(salt, secret, "sha256")
    block, output = b"", b""
    for number in range(1, -(-length // _HASH_BYTES) + 1):
        block = hmac.digest(extracted, block + info + bytes([number]), "sha256")
        output += block
    return output[:length]


def _joined(*names: str) -> bytes:
    """Encode ``names`` as bytes, such that different names always have different bytes."""
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    return b"".join(len(word).to_bytes(4, "big") + word for word in encoded)


def parse(value: Any) -> Secret:
    """Return the secret that is the value of a setting.

    Raises:
        TypeError, ValueError: the value is neither text nor bytes, or is too short.
    """
    if isinstance(value, Secret):
        return value
    encoded = os.fsencode(value) if isinstance(value, str) else value
    if not isinstance(encoded, bytes):
        raise TypeError
    if len(encoded) < LEAST_BYTES:
        raise ValueError
    return Secret(encoded)
