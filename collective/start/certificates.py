"""TLS for the connections of ranks on several hosts to the hub and to the store.

Both sides of a connection present a certificate that one authority has signed. TLS keeps the
messages confidential. It does not decide which processes may join: the secret does, so TLS
requires a secret as well. The data of the transport does not go over these connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.contract.secret import REMEDY
from collective.contract.world import Tls
from collective.errors import ConfigError

from .config_file import private_bytes

if TYPE_CHECKING:
    import ssl

    from .config import Config

__all__ = ["resolve"]

_KEYS = ("tls_cert", "tls_key", "tls_ca")


def resolve(config: Config) -> Tls | None:
    """Return the TLS contexts for the settings, or None if they name no certificates.

    Raises:
        ConfigError: a certificate or key is missing or cannot be used, or there is no secret.
    """
    given = [key for key in _KEYS if getattr(config, key)]
    if not given:
        return None
    missing = [key for key in _KEYS if key not in given]
    if missing:
        raise ConfigError(
            f"{given[0]}: {getattr(config, given[0])!r} ({config.origin(given[0])}) without "
            f"{' and '.join(missing)}; both sides of a connection present a certificate and check "
            "that of the other. Set COLLECTIVE_TLS_CERT, COLLECTIVE_TLS_KEY and COLLECTIVE_TLS_CA."
        )
    if config.resolved_secret() is None:
        raise ConfigError(
            f"tls_cert: {config.tls_cert!r} ({config.origin('tls_cert')}) is set, but no secret; "
            "certificates encrypt the connections, and the secret decides who may join. "
            f"{REMEDY}."
        )
    private_bytes("tls_key", config.tls_key, config.origin("tls_key"))
    return Tls(_context(config, listening=False), _context(config, listening=True))


def _context(config: Config, listening: bool) -> ssl.SSLContext:
    import ssl  # imported here, since most programs need no OpenSSL

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listening else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Ranks find each other's addresses at run time, so certificates cannot name them. Only the
    # authority that signed a certificate matters.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if listening:
        context.num_tickets = 0  # ranks do not resume sessions
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, _refuse_to_ask)
        context.load_verify_locations(config.tls_ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(f"{key} {getattr(config, key)!r}" for key in _KEYS)
        raise ConfigError(
            f"tls: {files}: {error}. All must be PEM files: a certificate, its key without a "
            "password, and the certificate of the authority that signed the certificates of all "
            "ranks."
        ) from error
    return context


def _refuse_to_ask() -> str:
    # Otherwise OpenSSL would ask for the password at the terminal, on each rank in turn.
    raise ValueError("the key is encrypted")
