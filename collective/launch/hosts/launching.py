"""Start of a program on several hosts, for ``collective run --hosts``, and the checks before it."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import collective
from collective import ConfigError, RendezvousError
from collective.control.secret import Secret, parse
from collective.inner import Config, HostSlots, load
from collective.platform.topology import Processor
from collective.start import certificates
from collective.start.network import (
    address_of,
    address_toward,
    interfaces,
    is_loopback,
    own_address,
)
from collective.start.rendezvous import Endpoint
from collective.start.resolver import of_run
from collective.start.stores import seal
from collective.start.tcp_store import StoreServer

from ..agent import Host
from ..agent_line import Message
from ..launcher import run_attempts, watch_over
from ..supervisor import MeetingStore, Place, Supervisor, bind
from ..variables import Run, inherited, python_path, shared_variables
from .agent import PROTOCOL
from .cluster import Cluster, Machine, SharedPaths, SignalledError, is_this_host

# How long a host may take until its agent answers: ssh, the shell, and the imports of Python.
_START_S = 30.0
# How long an agent may take for a step of the checks; a connection that fails takes two seconds.
_STEP_S = 10.0
# Clocks that differ by more seconds are wrong. Traces and certificates depend on them.
_CLOCKS_S = 30.0


def launch_on_hosts(
    run: Run,
    hosts: Sequence[HostSlots],
    *,
    script: str,
    spares: Sequence[HostSlots] = (),
    ssh: str = "ssh",
) -> int:
    """Run a program as ranks on several hosts and wait until all have ended.

    Args:
        run: the program, and the rules for lost ranks.
        hosts: the hosts, in the order of the ranks.
        script: script of the program, which all hosts must have; "" if the program is a module.
        spares: hosts on which ranks start when others are lost.
        ssh: command of ssh, with options.

    Returns:
        As :func:`collective.launch.launch`; 2 if a host cannot be used.
    """
    site = SharedPaths(os.getcwd(), script, sys.executable, python_path(), shlex.split(ssh))

    def supervise(control: int) -> int:
        try:
            with connected(hosts, spares, site, control) as cluster:
                return run_attempts(partial(_attempt, run, cluster), run, control, cluster.beat)
        except SignalledError as signalled:
            if signalled.number == signal.SIGINT:
                print("collective run: interrupted before the ranks started", file=sys.stderr)
            return 128 + signalled.number

    return watch_over(supervise, lambda: None)


@contextlib.contextmanager
def _attempt(run: Run, cluster: Cluster, number: int, control: int) -> Iterator[Supervisor]:
    """Yield the supervisor of an attempt, with a store and a secret of its own."""
    config = load({})
    machines: Sequence[Host] = cluster.machines
    usable = [machine for machine in cluster.living if not machine.leaving]
    bind(run, machines, number)
    places = _places(usable, run.size)
    first = usable[0]
    host = _store_address(cluster.living, config.interface)
    shared = shared_variables(run, "", "", first.hello["port"], number, "launcher")
    secret = of_run(parse(shared["COLLECTIVE_SECRET"]))
    tls = certificates.resolve(config).tls
    with StoreServer(host, secret, tls, config.port) as server:
        if number == 0:
            _check_reachability(cluster, server.endpoint, config)
        shared.update(COLLECTIVE_STORE=f"tcp://{server.endpoint}", MASTER_ADDR=first.address)
        environments = run.environments(
            {**inherited(os.environ), **shared}, [place.seat() for place in places]
        )
        numbers = [machines.index(place.host) for place in places]
        meeting = MeetingStore(seal(server.store(), secret), numbers, run.least, server.announce)
        yield Supervisor(control, run, environments, meeting, machines, places)


def _places(machines: Sequence[Machine], size: int) -> list[Place]:
    """Return the place of each rank: each host takes as many as it can before the next one.

    Raises:
        RendezvousError: the hosts take fewer than ``size`` ranks.
    """
    found: list[Place] = []
    for machine in machines:
        count = min(machine.slots, size - len(found))
        found += [Place(machine, local, count) for local in range(count)]
    if len(found) < size:
        names = ", ".join(machine.name for machine in machines) or "no host"
        raise RendezvousError(
            f"hosts: {size} ranks cannot start again: only {len(found)} fit on the hosts that are "
            f"left ({names}). Give spare hosts with --spares."
        )
    return found


@contextlib.contextmanager
def connected(
    hosts: Sequence[HostSlots], spares: Sequence[HostSlots], site: SharedPaths, control: int
) -> Iterator[Cluster]:
    """Connect to all hosts, and check that they have the same versions and files.

    Args:
        hosts, spares: hosts of the ranks, and spare hosts.
        site: what the hosts must have alike.
        control: pipe of :func:`collective.launch.launcher.watch_over`.

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
            machine.hello, machine.processes = hello, hello["processes"]
        _check_versions(cluster.machines)
        for machine in cluster.machines:
            machine.processors = [Processor(*fields) for fields in machine.hello["processors"]]
        order = {"kind": "enter", "directory": site.directory, "script": site.script}
        asked = time.time()
        answers = cluster.ask("entered", lambda machine: order, _STEP_S)
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


def _store_address(machines: Sequence[Machine], interface: str) -> str:
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


def _check_reachability(cluster: Cluster, store: Endpoint, config: Config) -> None:
    """Test that each host reaches all others and the store, before any rank starts.

    Args:
        store: address at which the supervisor serves the store.
        config: settings, with the interface and the ports that the ranks will use.

    Raises:
        RendezvousError: some hosts do not reach each other. The text names the pairs.
        ConfigError: a host has no such interface.
    """
    tokens = {machine: secrets.token_hex(8) for machine in cluster.machines}
    ports = _listen(cluster, store, config, tokens)
    if len(cluster.machines) > 1:
        _refuse_loopback(cluster.machines)
        _probe(cluster, store, ports, tokens)


def _listen(
    cluster: Cluster, store: Endpoint, config: Config, tokens: Mapping[Machine, str]
) -> dict[Machine, int]:
    """Have each host listen at the address that its ranks will use; return the ports."""
    listening = cluster.ask(
        "listening",
        lambda machine: {
            "kind": "listen",
            "interface": config.interface,
            "ports": config.port,
            "store": [store.host, store.port],
            "token": tokens[machine],
        },
        _STEP_S,
    )
    faults = [f"{m.name}: {answer['why']}" for m, answer in listening.items() if answer["why"]]
    if faults:
        raise ConfigError(f"hosts: {'; '.join(faults)}")
    for machine, answer in listening.items():
        machine.address, machine.interface = answer["address"], answer["interface"]
        if not machine.local:
            machine.pulse.place = machine.address, answer["port"]
    return {machine: answer["port"] for machine, answer in listening.items()}


def _refuse_loopback(machines: Sequence[Machine]) -> None:
    only_here = [m for m in machines if is_loopback(m.address)]
    if only_here:
        listed = ", ".join(f"{m.name} ({m.interface or 'lo'}, {m.address})" for m in only_here)
        raise RendezvousError(
            f"hosts: other hosts cannot reach {listed}: the ranks there would listen on loopback "
            "only. Set COLLECTIVE_INTERFACE to an interface that the hosts share, and map the "
            "host's name to its address there. In a container, give the container a network of "
            "its own or the host's (hostNetwork), with a name that resolves to it."
        )


def _probe(
    cluster: Cluster, store: Endpoint, ports: Mapping[Machine, int], tokens: Mapping[Machine, str]
) -> None:
    """Have each host connect to all others and to the store."""

    def probe(machine: Machine) -> Message:
        peers: list[list[Any]] = [
            [peer.name, peer.address, ports[peer], tokens[peer]]
            for peer in cluster.machines
            if peer is not machine
        ]
        return {"kind": "probe", "peers": [["", store.host, store.port, ""], *peers]}

    answers = cluster.ask("reached", probe, _STEP_S)
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
            + "Open all TCP ports between the hosts, or those of COLLECTIVE_PORT, or set "
            "COLLECTIVE_INTERFACE to an interface that all of them share."
        )


def _place(machine: Machine) -> str:
    return f"{machine.name} ({machine.interface}, {machine.address})"


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


def check_hosts(hosts: Sequence[HostSlots], ssh: Sequence[str]) -> list[dict[str, Any]]:
    """Check that a run could start on ``hosts``, as ``collective run --hosts`` does.

    Args:
        hosts: the hosts.
        ssh: command of ssh.

    Returns:
        For each host its ``name`` as given, and that which it gives itself (``host``); where its
        ranks would listen (``interface``, ``address``); its number of ``cores``; and its versions
        of ``python``, of this package (``version``) and of ``numpy``.

    Raises:
        ConfigError, RendezvousError: a run could not start; the text names hosts and remedy.
    """
    config = load({})
    site = SharedPaths(os.getcwd(), "", sys.executable, python_path(), ssh)
    control, handle = os.pipe()  # no signal ever arrives here: Ctrl-C raises
    try:
        with connected(hosts, (), site, control) as cluster:
            here = _store_address(cluster.machines, config.interface)
            secret = Secret(secrets.token_bytes(32))
            with StoreServer(here, secret, ports=config.port) as server:
                _check_reachability(cluster, server.endpoint, config)
            own = "python", "version", "numpy"
            return [
                {
                    "name": machine.name,
                    "host": machine.hello["host"],
                    "interface": machine.interface,
                    "address": machine.address,
                    "cores": len(machine.processors),
                    **{key: machine.hello[key] for key in own},
                }
                for machine in cluster.machines
            ]
    finally:
        os.close(control)
        os.close(handle)
