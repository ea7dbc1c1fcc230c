"""List of all settings: :data:`KEYS`, each with its default and its allowed values.

``collective run`` tells its ranks what no user sets in one variable, ``COLLECTIVE_LAUNCH``, such as
``restart=2,grow=on``. :data:`LAUNCH` lists its parts.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from collective.control.ports import Ports
from collective.control.secret import Secret, parse

from . import rendezvous

#: Value of ``secret`` for a job that has none, without the warning.
NO_SECRET = "none"
# What ``disable`` can switch off.
_PARTS = ("dump_signal", "native", "shm_adopt", "shm_single_copy")
_HOST_AND_PORT = re.compile(r"[^/]+:[0-9]+")


Value = str | int | float | Secret


@dataclass(frozen=True, slots=True)
class Key:
    """Description of a setting.

    Attributes:
        default: value if no source gives one.
        allowed: the allowed values, in words for an error text.
        doc: purpose of the setting.
        parse: function that converts a source's value; raises ValueError or TypeError.
        hazard: function that returns why a value is dangerous, in words such as "loads code", or
            "" if it is not. A dangerous value is refused from a file that is not private or does
            not belong to the user.
        hidden: whether values of this setting are never shown.
    """

    default: str | int | float | None
    allowed: str
    doc: str
    parse: Callable[[Any], Value]
    hazard: Callable[[Any], str] = lambda value: ""
    hidden: bool = False


def by_device(backend: str) -> dict[str, str]:
    """Return the transports of ``"cpu:shm,cuda:nccl"`` by device; empty for a plain name."""
    if not backend.startswith(("cpu:", "cuda:")):
        return {}
    return dict(part.strip().partition(":")[::2] for part in backend.split(","))


# -- values ------------------------------------------------------------------------


def _integer(least: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(value)
        if number < least:
            raise ValueError
        return number

    return parse


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, Real)):
        raise TypeError
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError
    return seconds


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    if not value.strip():
        raise ValueError
    return value.strip()


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return parse


def _check(value: Any) -> str:
    word, colon, interval = str(value).partition(":")
    if word not in ("auto", "always", "never", "results"):
        raise ValueError
    if colon and (word != "results" or int(interval) < 1):
        raise ValueError
    return str(value)


def _ports(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError
    return str(Ports.parse(str(value)))


def _library(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip():
        raise TypeError
    path = os.path.expanduser(path.strip())
    # A name without a slash is one for the system's linker to find.
    return os.path.abspath(path) if "/" in path else path


def _directory(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip():
        raise TypeError
    return os.path.abspath(os.path.expanduser(path))


def _disabled(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    parts = {part.strip() for part in value.split(",")} - {""}
    if not parts <= set(_PARTS):
        raise ValueError
    return ",".join(sorted(parts))


def _secret(value: Any) -> Secret | str:
    if value == NO_SECRET:
        return NO_SECRET
    if isinstance(value, str) and value.startswith("file:"):
        return f"file:{_directory(value.removeprefix('file:'))}"
    return parse(value)


def is_address(store: str) -> bool:
    """Tell whether a value of ``store`` is meant as an address, and not as a directory.

    An address without its ``tcp://`` is one, too, and an error. As a directory it would be made on
    each host, and the ranks would wait there for each other.
    """
    return store.startswith("tcp:") or _HOST_AND_PORT.fullmatch(store) is not None


def _meeting_place(value: Any) -> str:
    if isinstance(value, str) and is_address(value):
        return f"tcp://{rendezvous.from_url(value)}"
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise TypeError
    return os.path.abspath(os.path.expanduser(path))


def _join(value: Any) -> str:
    return "late" if value == "late" else _switch(value)


def _switch(value: Any) -> str:
    if value in (True, "on", "1"):
        return "on"
    if value in (False, "off", "0"):
        return "off"
    raise ValueError


# -- hazards: values that only a private file of the user may set --------------------


def _loads_code(value: str) -> str:
    return "loads code"


def _writes_files(value: str) -> str:
    return "" if value.startswith("tcp:") else "writes files"


def _opens_the_job(value: object) -> str:
    return "decides who may join"


def _may_load_code(value: str) -> str:
    """Return the hazard of a transport given as ``module:Class``; "" for a registered name."""
    names = by_device(value).values() or [value]
    return "loads code" if any(":" in name for name in names) else ""


#: All settings, by name.
KEYS: Mapping[str, Key] = {
    "backend": Key(
        "auto",
        "the name of a transport, such as 'shm', or 'auto'",
        "the transport, or one for each device: 'cpu:shm,cuda:nccl'",
        _word,
        _may_load_code,
    ),
    "rank": Key(0, "an integer >= 0", "number of this process among all processes", _integer(0)),
    "size": Key(1, "an integer >= 1", "how many processes there are", _integer(1)),
    "local_rank": Key(
        None,
        "an integer >= 0",
        "number of this process among the processes of its host (default: rank)",
        _integer(0),
    ),
    "local_size": Key(
        None, "an integer >= 1", "how many processes run on its host (default: size)", _integer(1)
    ),
    "timeout": Key(300.0, "a number of seconds > 0", "deadline of every call", _seconds),
    "start_timeout": Key(
        60.0, "a number of seconds > 0", "how long init waits for all ranks to arrive", _seconds
    ),
    "shrink_grace": Key(
        5.0,
        "a number of seconds > 0",
        "how long shrink() waits for ranks that have not called it and are not known to be lost",
        _seconds,
    ),
    "min_ranks": Key(
        1,
        "an integer >= 1",
        "how many ranks must survive a loss for a communicator to shrink",
        _integer(1),
    ),
    "join": Key(
        "off",
        "'off', 'on' or 'late'",
        "whether this process joins ranks that are already connected: on, in init(); late, with "
        "the first grow(), as `collective run --replace` sets it for the replacement of a lost "
        "rank",
        _join,
    ),
    "check": Key(
        "auto",
        "'auto', 'always', 'never', 'results', or 'results:10' for every tenth call",
        "whether ranks compare their calls (auto: if the transport compares them cheaply) or their "
        "results",
        _check,
    ),
    "store": Key(
        None,
        "a directory, or an address such as 'tcp://node1:29500'",
        "where the ranks of one launch meet: a private directory that all ranks see and no other "
        "launch uses; or an address of the host of rank 0, with a port that is free there",
        _meeting_place,
        _writes_files,
    ),
    "interface": Key(
        "",
        "the name of a network interface, such as 'eth0'",
        "the network interface for traffic between hosts (default: the one that routes to the "
        "other hosts)",
        _word,
    ),
    "port": Key(
        "",
        "a port such as 29600, or a range such as '29600-29663'",
        "the ports at which ranks listen for others, the same on all ranks, for a firewall "
        "(default: any free ports)",
        _ports,
    ),
    "across": Key(
        "auto",
        "the name of a transport, such as 'tcp', or 'auto'",
        "the transport between hosts under backend 'hierarchical' (auto: mpi under mpiexec, else "
        "tcp)",
        _word,
        _may_load_code,
    ),
    "trace": Key(
        "",
        "a directory that every rank can write to",
        "where each rank writes a trace of its calls (default: no trace)",
        _directory,
        _writes_files,
    ),
    "disable": Key(
        "",
        "a list of 'dump_signal', 'native', 'shm_adopt' and 'shm_single_copy', such as "
        "'native,shm_adopt'",
        "parts to switch off, for example while searching for an error: dump_signal, printing the "
        "flight recorder on SIGUSR2; native, the native core; shm_adopt, moving a framework's "
        "memory, such as DDP's buckets, into shared memory; shm_single_copy, reading ordinary "
        "memory of the peers directly",
        _disabled,
    ),
    "device": Key(
        None,
        "an integer >= 0",
        "number of this rank's GPU, as this process counts GPUs (default: local_rank, modulo their "
        "number)",
        _integer(0),
    ),
    "nccl_library": Key(
        "",
        "a file such as '/opt/nccl/lib/libnccl.so.2'",
        "the NCCL library (default: the one in NVIDIA's wheel, or the system's)",
        _library,
        _loads_code,
    ),
    "cuda_library": Key(
        "",
        "a file such as '/usr/lib/libcuda.so.1'",
        "the library of NVIDIA's driver (default: the system's)",
        _library,
        _loads_code,
    ),
    "secret": Key(
        None,
        "at least 16 bytes, such as the text that `openssl rand -hex 32` prints; or 'file:' and "
        "the path of a file of mode 0600 with them; or 'none'",
        "secret that only the ranks of this job know (`collective run` makes one); none omits the "
        "warning if ranks of several hosts have no secret",
        _secret,
        _opens_the_job,
        hidden=True,
    ),
    "tls": Key(
        "",
        "a directory with tls.crt, tls.key and ca.crt, which are PEM files",
        "this host's certificate, its private key, and the certificate of the authority that "
        "signed the certificates of all hosts: with them, the hub and the store use TLS",
        _directory,
        _opens_the_job,
    ),
}

#: Parts of ``COLLECTIVE_LAUNCH``, which only ``collective run`` sets: default and parser of each.
LAUNCH: Mapping[str, tuple[str | int, Callable[[Any], Value]]] = {
    # How often `collective run --max-restarts` has started the ranks again.
    "restart": (0, _integer(0)),
    # Whether elastic training checks at each commit for processes that want to join.
    "grow": ("off", _switch),
    # Which process serves a store at an address: rank 0, or the launcher.
    "store_server": ("rank", _one_of("rank", "launcher")),
}

_ONLY_LAUNCHERS = "set by `collective run` alone, as a part of COLLECTIVE_LAUNCH"
#: Former settings, and what each has become.
FORMER: Mapping[str, str] = {
    **{part: f"the value {part!r} of the setting disable" for part in _PARTS},
    **dict.fromkeys(("restart", "store_server"), _ONLY_LAUNCHERS),
    "grow": f"{_ONLY_LAUNCHERS}. In a program, write elastic.generations(..., grow=True)",
    "dump_signal": "the value 'dump_signal' of the setting disable, for no signal. For another "
    "signal than SIGUSR2, have a handler of the program print collective.flight_recorder()",
    "secret_file": "a value of the setting secret: 'file:' and the path",
    "insecure": f"the value {NO_SECRET!r} of the setting secret",
    **{
        f"tls_{kind}": f"the file {file} in the directory that the setting tls names"
        for kind, file in {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}.items()
    },
}
