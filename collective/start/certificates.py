"""Secret of a job, and TLS for connections of ranks on several hosts to the hub and to the store.

Both sides of a connection present a certificate that one authority has signed. TLS keeps the
messages confidential. It does not decide which processes may join: the secret does, so TLS
requires a secret as well. The data of the transport does not go over these connections.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from collective.control.link import Tls
from collective.control.secret import REMEDY, Secret
from collective.errors import ConfigError

from .config_file import private_bytes, read_secret
from .keys import NO_SECRET

if TYPE_CHECKING:
    import ssl

    from .config import Config

_CERTIFICATE, _KEY, _AUTHORITY = "tls.crt", "tls.key", "ca.crt"


class Protection(NamedTuple):
    """What keeps strangers out of a job.

    Attributes:
        secret: secret of the job, or of one of its meetings; None without one.
        tls: TLS contexts, or None if the setting names no directory.
    """

    secret: Secret | None
    tls: Tls | None


def resolve(config: Config, *context: str) -> Protection:
    """Return the job's secret, which may be in a file, and its TLS contexts.

    Args:
        config: the settings.
        context: if given, what the ranks of one meeting share with no other. The secret is that of
            this meeting.

    Raises:
        ConfigError: the secret file is not trusted, missing, or has a wrong length; a certificate
            or key is missing or cannot be used, or there is no secret beside them.
    """
    secret = config.secret
    if isinstance(secret, str):
        path = secret.removeprefix("file:")
        is_none = secret == NO_SECRET
        secret = None if is_none else read_secret(path, config.origins["secret"])
    if secret is not None and context:
        secret = secret.within(*context)
    if not config.tls:
        return Protection(secret, None)
    if secret is None:
        raise ConfigError(
            f"tls: {config.tls!r} ({config.origins['tls']}) is set, but no secret; "
            "certificates encrypt the connections, and the secret decides who may join. "
            f"{REMEDY}."
        )
    private_bytes("tls", os.path.join(config.tls, _KEY), config.origins["tls"])
    contexts = (_context(config.tls, listening) for listening in (False, True))
    return Protection(secret, Tls(*contexts))


def _context(directory: str, listening: bool) -> ssl.SSLContext:
    import ssl  # imported here, since most programs need no OpenSSL

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Ranks find each other's addresses at run time, so certificates cannot name them. Only the
    # authority that signed a certificate matters.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if listening:
        context.num_tickets = 0  # ranks do not resume sessions
    certificate, key, authority = (
        os.path.join(directory, name) for name in (_CERTIFICATE, _KEY, _AUTHORITY)
    )
    try:
        context.load_cert_chain(certificate, key, _refuse_to_ask)
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"tls: {directory!r}: {error}. It must have three PEM files: {_CERTIFICATE}, the "
            f"certificate of this host; {_KEY}, its key without a password; and {_AUTHORITY}, the "
            "certificate of the authority that signed the certificates of all ranks."
        ) from error
    return context


def _refuse_to_ask() -> str:
    # Otherwise OpenSSL would ask for the password at the terminal, on each rank in turn.
    raise ValueError("the key is encrypted")
