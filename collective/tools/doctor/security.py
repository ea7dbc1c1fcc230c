"""What is authenticated and what is encrypted where ranks of several hosts meet."""

from __future__ import annotations

from typing import Any

from collective.errors import ConfigError
from collective.start import certificates
from collective.start.config import Config

__all__ = ["across_hosts"]


def across_hosts(config: Config | None) -> dict[str, Any]:
    """Return what the settings come to, as ``docs/doctor.md`` lists it; SECURITY.md says why.

    Args:
        config: None where the settings contradict each other.
    """
    error, known, encrypted, ours = "", False, False, True
    if config is not None:
        try:
            known = config.resolved_secret() is not None
            encrypted = certificates.resolve(config) is not None
        except ConfigError as refused:
            error = str(refused)
        # torchrun's agent serves a store of torch's, which knows no TLS.
        agents = config.launched is not None and config.launched.launcher == "torchrun"
        ours = config.store is not None or not agents
    return {
        "joining": {"authenticated": known, "encrypted": encrypted and ours},
        "control": {"authenticated": known, "encrypted": encrypted},
        "data": {"authenticated": known, "encrypted": False},
        "error": error,
    }
