"""Store that accepts only values of this job, even if others can write to it."""

from __future__ import annotations

import hmac
import secrets

from collective.contract.secret import COMPARE, Secret
from collective.contract.store import NotPublishedError, Store, WrappedStore
from collective.deadline import Deadline
from collective.errors import RendezvousError

__all__ = ["SealedStore", "seal"]

_NONCE_BYTES, _TAG_BYTES = 16, 32


class SealedStore(WrappedStore):
    """Wrapper of a store that authenticates names and values with a secret.

    A value is stored as ``nonce | value | tag``. The tag is HMAC-SHA256 (RFC 2104) over the key's
    name, the nonce and the value. A name is stored as its own HMAC. Both HMAC keys are derived
    from the secret, which belongs to one job and one rendezvous of it. So a value that is copied
    from another job, rendezvous or name has no valid tag. Values are not encrypted: everybody who
    can read the store can read them.

    Args:
        store: store to wrap, of any kind.
        secret: secret that all ranks share.

    Raises:
        RendezvousError: a method that reads finds a value without a valid tag, which another
            program has written.
    """

    def __init__(self, store: Store, secret: Secret) -> None:
        super().__init__(store)
        self._of_names, self._of_values = secret.key("store names"), secret.key("store values")

    def set(self, key: str, value: bytes) -> None:
        super().set(key, self._sealed(key, value))

    def get(self, key: str, deadline: Deadline) -> bytes:
        try:
            sealed = super().get(key, deadline)
        except NotPublishedError as error:
            raise NotPublishedError(
                f"{error}; a rank with another secret, or none, cannot publish it. {COMPARE}."
            ) from error
        return self._opened(key, sealed)

    def try_get(self, key: str) -> bytes | None:
        sealed = super().try_get(key)
        return None if sealed is None else self._opened(key, sealed)

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        sealed = super()._poll(key, deadline)
        return None if sealed is None else self._opened(key, sealed)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return self._opened(key, super().put_if_absent(key, self._sealed(key, value)))

    def _name(self, key: str) -> str:
        return hmac.digest(self._of_names, key.encode(), "sha256").hex()

    def _tag(self, key: str, content: bytes) -> bytes:
        # The name's length comes first, so that no two pairs of name and content give the same
        # bytes.
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
                f"rendezvous: the store at {self._store} holds a value for {key!r} that does not "
                "belong to this job: its writer does not know the job's secret. Another program "
                "can write to the store. Use a store for this launch only, or restrict access to "
                "it."
            )
        return content[_NONCE_BYTES:]


def seal(store: Store, secret: Secret | None) -> Store:
    """Return ``store`` sealed with ``secret``, or ``store`` itself if ``secret`` is None."""
    return store if secret is None else SealedStore(store, secret)
