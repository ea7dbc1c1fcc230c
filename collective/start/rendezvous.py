"""Rendezvous address of ranks on several hosts, as given by the launcher or the user."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from collective.errors import ConfigError

from .launchers import Launched

#: Pattern of a host's name; ``user@`` may precede it. A name that begins with a dash would be an
#: option of ssh, and of the commands that errors advise.
HOST_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@%+-]*"
#: Pattern of a host: a name or an address.
HOST = rf"{HOST_NAME}|[0-9A-Fa-f:.]+(?:%{HOST_NAME})?"

# Range of the port that all tasks of srun compute alike: above the well-known ports, and below
# the ports that Linux gives to outgoing connections.
_PORTS = range(15000, 30000)


class Endpoint(NamedTuple):
    """Address at which one process serves all ranks.

    Attributes:
        host: a name or an address.
        port: TCP port.
        origin: source of the address, for error texts, such as ``MASTER_ADDR and MASTER_PORT``.
        served: whether a process of the launcher serves there; otherwise rank 0 does.
    """

    host: str
    port: int
    origin: str
    served: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def from_text(text: str, origin: str) -> Endpoint | None:
    """Return the endpoint ``host:port``; the host may be ``[::1]``. None if the text is no such.

    Args:
        text: address that a framework gives.
        origin: its source in words.
    """
    host, _, port = text.rpartition(":")
    return Endpoint(host.strip("[]"), int(port), origin) if host and port.isdecimal() else None


def from_url(url: str) -> Endpoint:
    """Return the endpoint of ``tcp://host:port``; the host may be ``[::1]``.

    Raises:
        ValueError: ``url`` does not have this form.
    """
    parts = urlsplit(url)
    extra = parts.path or parts.query or parts.fragment or parts.username
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or extra:
        raise ValueError(url)
    if not re.fullmatch(HOST, parts.hostname):
        raise ValueError(url)
    # urlsplit() makes hostname lower case, which is harmless: names ignore case.
    return Endpoint(parts.hostname, parts.port, "COLLECTIVE_STORE")


def from_environment(environ: Mapping[str, str], launched: Launched | None) -> Endpoint | None:
    """Return the endpoint that the launcher or the user's script has set, or None.

    The endpoint is ``MASTER_ADDR`` and ``MASTER_PORT``, which torchrun sets and batch scripts
    export. Under srun, defaults replace missing variables: the first host of the step, where
    rank 0 runs, and a port that is computed from the numbers of job and step.

    Raises:
        ConfigError: one of the two variables is missing, or the host or the port is not valid.
    """
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    slurm = launched is not None and launched.launcher == "slurm"
    origin = "MASTER_ADDR and MASTER_PORT"
    if not host and slurm:
        name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
        if name not in environ:
            return None
        host, origin = expand(environ[name], name)[0], f"the first host of {name}"
    if not host and not port:
        return None
    if not host or not (port or slurm):
        given, missing = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        raise ConfigError(
            f"rendezvous: {given}={host or port} is set and {missing} is not; ranks need both to "
            "meet. Set both, the same on all ranks: the host of rank 0 and a port that is free "
            "there."
        )
    if not re.fullmatch(HOST, host):
        raise ConfigError(
            f"rendezvous: MASTER_ADDR={host!r}; it must be a name or an address of the host of "
            "rank 0, and no name begins with a dash. Set it to that host."
        )
    served = (
        launched is not None
        and launched.launcher == "torchrun"
        and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    return Endpoint(host, _port(port) if port else _derived(environ), origin, served)


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text.strip()) or not 0 < int(text) < 65536:
        raise ConfigError(
            f"rendezvous: MASTER_PORT={text!r}; it must be an integer from 1 to 65535. Set it to "
            "a port that is free on the host of rank 0."
        )
    return int(text)


def _derived(environ: Mapping[str, str]) -> int:
    name = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return _PORTS[int.from_bytes(digest, "little") % len(_PORTS)]


# -- Slurm's lists of hosts ----------------------------------------------------------------


def expand(hostlist: str, name: str) -> list[str]:
    """Return the hosts of a list in Slurm's notation, such as ``node[01-03,7],x``.

    If a name has several brackets, the last one changes fastest, like the digits of a number.

    Args:
        hostlist: the list.
        name: the variable that holds the list, for the error text.

    Raises:
        ConfigError: the text is not such a list.
    """
    item = r"[^\[\],\s]*(?:\[[0-9,-]+\][^\[\],\s]*)*"
    if not hostlist.strip() or not re.fullmatch(rf"{item}(?:,{item})*", hostlist.strip()):
        raise _unreadable(hostlist, name)
    hosts = []
    for part in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", hostlist.strip()):
        names = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            endings = [text] if text else list(_numbers(ranges, hostlist, name))
            names = [start + end for start in names for end in endings]
        hosts += names
    if not all(re.fullmatch(HOST_NAME, host) for host in hosts):
        raise _unreadable(hostlist, name)
    return hosts


def _numbers(ranges: str, hostlist: str, name: str) -> Iterator[str]:
    """Yield the numbers of ``01-03,7``, with their leading zeros."""
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _unreadable(hostlist, name)
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield f"{number:0{len(match[1])}d}"


def _unreadable(hostlist: str, name: str) -> ConfigError:
    return ConfigError(
        f"launcher slurm: {name}={hostlist!r}; it must be a list of hosts such as "
        "'node[01-03,7],x', as srun sets it. No name begins with a dash."
    )
