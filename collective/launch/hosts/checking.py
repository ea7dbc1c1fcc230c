"""Check of hosts without a run, for ``collective doctor --hosts``."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from typing import NamedTuple

from collective.contract.secret import Secret
from collective.start.config import load
from collective.start.host_list import HostSlots
from collective.start.tcp_store import StoreServer

from ..variables import python_path
from .cluster import Site
from .connecting import check_reachability, connected, store_address

__all__ = ["HostReport", "check_hosts"]


class HostReport(NamedTuple):
    """Facts about a host that can be used.

    Attributes:
        name: name of the host, as given.
        host: name that the host gives itself.
        interface, address: where its ranks would listen.
        cores: number of cores.
        python, version, numpy: versions of Python, of this package and of NumPy.
    """

    name: str
    host: str
    interface: str
    address: str
    cores: int
    python: str
    version: str
    numpy: str


def check_hosts(hosts: Sequence[HostSlots], ssh: Sequence[str]) -> list[HostReport]:
    """Check that a run could start on ``hosts``, as ``collective run --hosts`` does.

    Args:
        hosts: the hosts.
        ssh: command of ssh.

    Raises:
        ConfigError, RendezvousError: a run could not start; the text names hosts and remedy.
    """
    config = load({})
    site = Site(os.getcwd(), "", sys.executable, python_path(), ssh)
    control, handle = os.pipe()  # no signal ever arrives here: Ctrl-C raises
    try:
        with connected(hosts, (), site, control) as cluster:
            here = store_address(cluster.machines, config.interface)
            with StoreServer(here, Secret(secrets.token_bytes(32))) as server:
                check_reachability(cluster, server.endpoint, config.interface)
            return [
                HostReport(
                    machine.name,
                    machine.hello["host"],
                    machine.interface,
                    machine.address,
                    machine.hello["cores"],
                    machine.hello["python"],
                    machine.hello["version"],
                    machine.hello["numpy"],
                )
                for machine in cluster.machines
            ]
    finally:
        os.close(control)
        os.close(handle)
