"""Start of a program on several hosts, for ``collective run --hosts``."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from collective.contract.secret import parse
from collective.generations.arrivals import Arrivals
from collective.start import certificates
from collective.start.config import load
from collective.start.connecting import failing, tell_ended
from collective.start.host_list import HostSlots
from collective.start.resolver import of_run
from collective.start.stores import seal
from collective.start.tcp_store import StoreServer

from ..attempts import run_attempts
from ..supervisor import Replacing, Supervisor
from ..variables import inherited, python_path, rank_variables, shared_variables
from ..watching import watch_over
from .cluster import Cluster, SignalledError, Site
from .connecting import check_reachability, connected, store_address
from .supervisor import HostsSupervisor, places

__all__ = ["launch_on_hosts"]


def launch_on_hosts(
    program: Sequence[str],
    hosts: Sequence[HostSlots],
    size: int,
    settings: Mapping[str, str],
    *,
    script: str,
    spares: Sequence[HostSlots] = (),
    ssh: str = "ssh",
    min_ranks: int | None = None,
    max_restarts: int = 0,
    replace: bool = False,
    verbose: bool = False,
) -> int:
    """Run a program as ``size`` ranks on several hosts and wait until all have ended.

    Args:
        program, size, settings, min_ranks, max_restarts, replace, verbose: as for
            :func:`collective.launch.launch`.
        hosts: the hosts, in the order of the ranks.
        script: script of the program, which all hosts must have; "" if the program is a module.
        spares: hosts on which ranks start when others are lost.
        ssh: command of ssh, with options.

    Returns:
        As :func:`collective.launch.launch`; 2 if a host cannot be used.
    """
    site = Site(
        os.getcwd(),
        script,
        sys.executable,
        python_path(),
        shlex.split(ssh),
    )
    run = partial(
        _Run, [sys.executable, "-u", *program], size, settings, min_ranks or size, replace, verbose
    )

    def supervise(control: int) -> int:
        try:
            with connected(hosts, spares, site, control) as cluster:
                attempt = run(cluster).attempt
                return run_attempts(attempt, size, max_restarts, control, cluster.beat)
        except SignalledError as signalled:
            if signalled.number == signal.SIGINT:
                print("collective run: interrupted before the ranks started", file=sys.stderr)
            return 128 + signalled.number

    return watch_over(supervise, lambda: None)


class _Run:
    """One run on connected hosts, for all its attempts."""

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        settings: Mapping[str, str],
        min_ranks: int,
        replace: bool,
        verbose: bool,
        cluster: Cluster,
    ) -> None:
        self._command = command
        self._size = size
        self._settings = settings
        self._spare = size - min_ranks
        self._replace = replace
        self._verbose = verbose
        self._cluster = cluster

    @contextlib.contextmanager
    def attempt(self, number: int, control: int) -> Iterator[Supervisor]:
        """Yield the supervisor of an attempt, with a store and a secret of its own."""
        config = load({})
        usable = [machine for machine in self._cluster.living if not machine.leaving]
        where = places(usable, self._size)
        first = where[0].machine
        host = store_address(self._cluster.living, config.interface)
        shared = shared_variables(self._size, "", "", first.hello["port"], number)
        secret = of_run(parse(shared["COLLECTIVE_SECRET"]))
        with StoreServer(host, secret, certificates.resolve(config)) as server:
            if number == 0:
                check_reachability(self._cluster, server.endpoint, config.interface)
            shared.update(
                COLLECTIVE_STORE=f"tcp://{server.endpoint}",
                COLLECTIVE_STORE_SERVER="launcher",
                MASTER_ADDR=first.address,
            )
            if self._replace:
                shared["COLLECTIVE_GROW"] = "on"
            common = {**inherited(os.environ), **shared, **self._settings}
            environments = [
                {
                    **common,
                    **rank_variables(
                        rank, place.local_rank, place.local_size, place.machine.hello["cores"]
                    ),
                }
                for rank, place in enumerate(where)
            ]
            met_in = seal(server.store(), secret)
            hosts = [self._cluster.machines.index(place.machine) for place in where]

            def tell(ended: Mapping[int, str]) -> None:
                tell_ended(met_in, ended, hosts, self._size - self._spare)

            admitted = Arrivals(met_in, "").admitted
            replacing = Replacing(environments, admitted) if self._replace else None
            yield HostsSupervisor(
                control, self._command, environments, self._cluster, where, server.announce,
                self._spare, replacing, self._verbose, tell, partial(failing, met_in),
            )  # fmt: skip
