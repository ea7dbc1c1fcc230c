"""Connection to the hosts of a run, and the checks of the hosts before any rank starts."""

from __future__ import annotations

import contextlib
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import collective
from collective.errors import ConfigError, RendezvousError
from collective.start.host_list import HostSlots
from collective.start.network import (
    address_of,
    address_toward,
    interfaces,
    is_loopback,
    own_address,
)
from collective.start.rendezvous import Endpoint

from .agent import PROTOCOL
from .channel import Message
from .cluster import Cluster, Machine, Site, is_this_host
from .pulse import Knocks

__all__ = ["check_reachability", "connected", "store_address"]

# How long a host may take until its agent answers: ssh, the shell, and the imports of Python.
_START_S = 30.0
# How long an agent may take for a step of the checks; a connection that fails takes two seconds.
_STEP_S = 10.0
# Clocks that differ by more seconds are wrong. Traces and certificates depend on them.
_CLOCKS_S = 30.0


@contextlib.contextmanager
def connected(
    hosts: Sequence[HostSlots], spares: Sequence[HostSlots], site: Site, control: int
) -> Iterator[Cluster]:
    """Connect to all hosts, and check that they have the same versions and files.

    Args:
        hosts, spares: hosts of the ranks, and spare hosts.
        site: what the hosts must have alike.
        control: pipe of :func:`collective.launch.watching.watch_over`.

    Raises:
        ConfigError: a host has another version, or lacks a file; or there is no ssh.
        RendezvousError: a host does not answer.
        SignalledError: a signal arrived, or the launcher has ended.
    """
    names = [name for name, _ in (*hosts, *spares)]
    if not all(map(is_this_host, names)) and shutil.which(site.ssh[0]) is None:
        raise ConfigError(
            f"hosts: {site.ssh[0]!r} is needed to reach {', '.join(names)}, and there is none on "
            "PATH. Install an ssh client, or name another with --ssh."
        )
    cluster = Cluster([Machine(host, site) for host in (*hosts, *spares)], control)
    try:
        for machine, hello in cluster.ask("hello", None, _START_S).items():
            machine.hello = hello
        _refuse_lost(cluster)
        _check_versions(cluster.machines)
        order = {"kind": "enter", "directory": site.directory, "script": site.script}
        asked = time.time()
        answers = cluster.ask("entered", lambda machine: order, _STEP_S)
        _refuse_lost(cluster)
        _check_clocks(answers, asked, time.time())
        missing = [f"{m.name}: {answer['why']}" for m, answer in answers.items() if answer["why"]]
        if missing:
            raise ConfigError(
                f"hosts: {'; '.join(missing)}. All hosts need the same files at the same path, "
                "such as those of a shared file system."
            )
        yield cluster
    finally:
        cluster.close()


def store_address(machines: Sequence[Machine], interface: str) -> str:
    """Return the address of this host at which all hosts reach it.

    Args:
        interface: network interface that the ranks will use; empty for any.

    Raises:
        ConfigError: there is no such interface.
    """
    others = [machine for machine in machines if not machine.local]
    if not others:
        return "127.0.0.1"
    if interface:
        return address_of(interface)
    own = {address for found in interfaces() for address in found.addresses}
    for machine in others:
        # sshd knows the address from which this host has come.
        client = str(machine.hello["client"])
        if client in own and not is_loopback(client):
            return client
        with contextlib.suppress(RendezvousError):
            address = address_toward(machine.name.rpartition("@")[2], 22)
            if not is_loopback(address):
                return address
    return own_address()


def check_reachability(cluster: Cluster, store: Endpoint, interface: str) -> None:
    """Test that each host reaches all others and the store, before any rank starts.

    Args:
        store: address at which the supervisor serves the store.
        interface: network interface that the ranks will use; empty for the one toward the store.

    Raises:
        RendezvousError: some hosts do not reach each other. The text names the pairs.
        ConfigError: a host has no such interface.
    """
    tokens = {machine: secrets.token_hex(8) for machine in cluster.machines}
    listening = cluster.ask(
        "listening",
        lambda machine: {
            "kind": "listen",
            "interface": interface,
            "store": [store.host, store.port],
            "token": tokens[machine],
        },
        _STEP_S,
    )
    _refuse_lost(cluster)
    faults = [f"{m.name}: {answer['why']}" for m, answer in listening.items() if answer["why"]]
    if faults:
        raise ConfigError(f"hosts: {'; '.join(faults)}")
    for machine, answer in listening.items():
        machine.address, machine.interface = answer["address"], answer["interface"]
        if not machine.local:
            machine.pulse.knocks = Knocks(machine.address, answer["port"])
    if len(cluster.machines) == 1:
        return
    only_here = [m for m in cluster.machines if is_loopback(m.address)]
    if only_here:
        listed = ", ".join(f"{m.name} ({m.interface or 'lo'}, {m.address})" for m in only_here)
        raise RendezvousError(
            f"hosts: other hosts cannot reach {listed}: the ranks there would listen on loopback "
            "only. Set COLLECTIVE_INTERFACE to an interface that the hosts share, and map the "
            "host's name to its address there. In a container, give the container a network of "
            "its own or the host's (hostNetwork), with a name that resolves to it."
        )

    def probe(machine: Machine) -> Message:
        peers: list[list[Any]] = [
            [peer.name, peer.address, listening[peer]["port"], tokens[peer]]
            for peer in cluster.machines
            if peer is not machine
        ]
        return {"kind": "probe", "peers": [["", store.host, store.port, ""], *peers]}

    answers = cluster.ask("reached", probe, _STEP_S)
    _refuse_lost(cluster)
    by_name = {machine.name: machine for machine in cluster.machines}
    lines = [
        f"{machine.name} ({machine.interface}, {machine.address}) -> "
        + (f"{_place(by_name[name])}: {reason}" if name else f"this host ({store}): {reason}")
        for machine, answer in answers.items()
        for name, reason in answer["failures"]
    ]
    if lines:
        raise RendezvousError(
            "hosts: some hosts cannot connect to others at the addresses that ranks would use:\n"
            + "".join(f"  {line}\n" for line in lines)
            + "Open all TCP ports between the hosts, or set COLLECTIVE_INTERFACE to an interface "
            "that all of them share."
        )


def _place(machine: Machine) -> str:
    return f"{machine.name} ({machine.interface}, {machine.address})"


def _refuse_lost(cluster: Cluster) -> None:
    lost = [f"host {machine.name}: {machine.lost}" for machine in cluster.machines if machine.lost]
    if lost:
        listed = "\n  ".join(lost)
        first = next(machine.name for machine in cluster.machines if machine.lost)
        raise RendezvousError(
            f"hosts: {len(lost)} of {len(cluster.machines)} hosts cannot be used:\n  {listed}\n"
            f"Check that `ssh {first} true` works without a password, and that "
            f"{sys.executable} exists there."
        )


def _check_versions(machines: Sequence[Machine]) -> None:
    """Refuse hosts whose Python or package differs from that of this host."""
    own = {
        "protocol": PROTOCOL,
        "version": collective.__version__,
        "python": platform.python_version(),
    }
    words = {"protocol": "protocol", "version": "collective", "python": "Python"}
    faults = []
    for machine in machines:
        for key, value in own.items():
            theirs = machine.hello.get(key)
            if _series(key, theirs) != _series(key, value):
                faults.append(f"{machine.name} has {words[key]} {theirs}, this host {value}")
    if faults:
        raise ConfigError(
            f"hosts: the hosts have different versions: {'; '.join(faults)}. Install the same "
            "versions on all hosts, or use one environment on a file system that all see."
        )


def _series(key: str, version: object) -> object:
    """Return the part of a version that must be equal: of Python 3.11.7, it is 3.11."""
    return str(version).rpartition(".")[0] if key == "python" else version


def _check_clocks(answers: Mapping[Machine, Message], asked: float, heard: float) -> None:
    """Refuse hosts whose clock differs from that of this host."""
    faults = []
    for machine, answer in answers.items():
        # The clock was read at some moment between the question and the last answer.
        ahead, behind = answer["time"] - heard, asked - answer["time"]
        if max(ahead, behind) > _CLOCKS_S:
            word = "ahead of" if ahead > 0 else "behind"
            faults.append(f"{machine.name} is {max(ahead, behind):.0f} s {word} this host")
    if faults:
        raise ConfigError(
            f"hosts: the clocks of the hosts differ: {'; '.join(faults)}. Traces and certificates "
            "need the same time everywhere. Set the clocks, for example with `chronyc makestep`."
        )
