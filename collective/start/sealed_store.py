"""A store whose values are this job's alone, whoever else can write to it."""

from __future__ import annotations

import hmac
import secrets

from collective.contract.secret import Secret
from collective.contract.store import Store, WrappedStore
from collective.deadline import Deadline
from collective.errors import RendezvousError

__all__ = ["SealedStore", "seal"]

_NONCE_BYTES, _TAG_BYTES = 16, 32


class SealedStore(WrappedStore):
    """Another store, with names and values that only those understand who know a secret.

    A value travels as ``nonce | value | tag``, where the tag is HMAC-SHA256 (RFC 2104) over the
    key's name, the nonce and the value; a name travels as its own HMAC. Both keys follow from
    the secret, which is of one job and one of its meetings: what is copied from another, or
    from another name, has no valid tag. Values can be read by whoever reads the store.

    Args:
        store: any.
        secret: the same for all ranks.

    Raises:
        RendezvousError: from the methods that read: a value that somebody else has put there.
    """

    def __init__(self, store: Store, secret: Secret) -> None:
        super().__init__(store)
        self._of_names, self._of_values = secret.key("store names"), secret.key("store values")

    def set(self, key: str, value: bytes) -> None:
        super().set(key, self._sealed(key, value))

    def get(self, key: str, deadline: Deadline) -> bytes:
        try:
            sealed = super().get(key, deadline)
        except RendezvousError as error:
            raise RendezvousError(
                f"{error}; a rank with another secret, or none, would not be seen"
            ) from error
        return self._opened(key, sealed)

    def try_get(self, key: str) -> bytes | None:
        sealed = super().try_get(key)
        return None if sealed is None else self._opened(key, sealed)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return self._opened(key, super().put_if_absent(key, self._sealed(key, value)))

    def _name(self, key: str) -> str:
        return hmac.digest(self._of_names, key.encode(), "sha256").hex()

    def _tag(self, key: str, content: bytes) -> bytes:
        # With the name's length: no other name and content are the same bytes.
        name = key.encode()
        message = len(name).to_bytes(4, "big") + name + content
        return hmac.digest(self._of_values, message, "sha256")

    def _sealed(self, key: str, value: bytes) -> bytes:
        content = secrets.token_bytes(_NONCE_BYTES) + value
        return content + self._tag(key, content)

    def _opened(self, key: str, sealed: bytes) -> bytes:
        content, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        if len(sealed) < _NONCE_BYTES + _TAG_BYTES or not hmac.compare_digest(
            tag, self._tag(key, content)
        ):
            raise RendezvousError(
                f"rendezvous: the store at {self._store} holds a value that is not this job's, for "
                f"{key!r}: whoever wrote it does not know its secret. Somebody else reaches the "
                "store: use one of this launch's own, or keep others from it."
            )
        return content[_NONCE_BYTES:]


def seal(store: Store, secret: Secret | None) -> Store:
    """Return ``store`` sealed with ``secret``, or as it is if there is none."""
    return store if secret is None else SealedStore(store, secret)
