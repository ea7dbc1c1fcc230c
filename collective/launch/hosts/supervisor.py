"""Supervisor of ranks on several hosts: each host's agent starts them and reports their ends.

All that does not touch a process is as on one host: output, tracebacks, the search for the first
failure, signals, and the rules for lost ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

from collective.contract.process import RankProcess
from collective.deadline import Deadline
from collective.errors import RendezvousError

from ..processes import Activity
from ..rank import Rank
from ..supervisor import Replacing, Supervisor
from .agent import BEAT_S
from .channel import Message, Output
from .cluster import Cluster, Machine

__all__ = ["HostsSupervisor", "Place", "places"]

# How long an agent may take to end what the ranks have left, beside its patience with them.
_FINISH_S = 8.0
_READ = 1 << 16


class Place(NamedTuple):
    """Place of a rank.

    Attributes:
        machine: host of the rank.
        local_rank: number of the rank among those of the host.
        local_size: number of ranks on the host.
    """

    machine: Machine
    local_rank: int
    local_size: int


def places(machines: Sequence[Machine], size: int) -> list[Place]:
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


class HostRank(Rank):
    """Rank that an agent has started.

    Attributes:
        machine: host of the rank.
        process: number of its process in messages.
        pid: process id on the host; 0 until it is known.
        local_rank: number of the rank among those of the host.
    """

    def __init__(self, number: int, place: Place, process: int, joins: bool) -> None:
        super().__init__(number, joins)
        self.machine = place.machine
        self.local_rank = place.local_rank
        self.process = process
        self.pid = 0
        self.look = Activity(0.0, True)  # until the first beat

    def send(self, number: int, *, group: bool) -> None:
        if self.runs and not self.machine.lost:
            order = {"kind": "signal", "process": self.process, "number": int(number)}
            self.machine.channel.post({**order, "group": group})

    def activity(self) -> Activity | None:
        return self.look if self.runs else None

    def is_among(self, processes: Set[RankProcess]) -> bool:
        own = self.machine.hello["processes"], self.pid
        return own in {(process.host, process.pid) for process in processes}


class HostsSupervisor(Supervisor):
    """Supervisor of one run on several hosts, with one process for each environment.

    Args:
        control, command, environments, spare, replacing, verbose, tell, failing: as in
            :class:`Supervisor`. The variables are added to those of each host.
        cluster: the hosts.
        where: place of each rank.
        announce: function that tells the ranks which processes are lost: host and number of each.
    """

    def __init__(
        self,
        control: int,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        cluster: Cluster,
        where: Sequence[Place],
        announce: Callable[[Sequence[tuple[str, int]]], object],
        spare: int = 0,
        replacing: Replacing | None = None,
        verbose: bool = False,
        tell: Callable[[Mapping[int, str]], object] = lambda ended: None,
        failing: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        super().__init__(control, command, environments, spare, replacing, verbose, tell, failing)
        self._cluster = cluster
        self._where = where
        self._announce = announce
        self._by_process: dict[int, HostRank] = {}
        self._beat = Deadline(0.0)
        self._looked = time.monotonic()
        self._finished: set[Machine] = set()

    def _begin(self) -> None:
        for machine in self._cluster.living:
            machine.pulse.hear()  # nobody has listened between two attempts
            self._add_source(machine.channel.incoming, partial(self._hear, machine))
            self._watch(machine.errors, partial(self._complain, machine))
        super()._begin()

    def _start(self, number: int, environment: Mapping[str, str], joins: bool = False) -> None:
        place = self._free_place(number) if joins else self._where[number]
        assert place is not None
        if joins:
            environment = {**environment, **_at(place, len(self._environments))}
        rank = HostRank(number, place, self._cluster.number(), joins)
        self._by_process[rank.process] = rank
        self._attend(rank)
        if place.machine.lost:  # since another rank was started
            self._lose_rank(rank)
            return
        place.machine.channel.post(
            {
                "kind": "start",
                "process": rank.process,
                "command": list(self._command),
                "environment": dict(environment),
                # Ranks cannot read a terminal from another session.
                "stdin": number == 0 and not joins and not os.isatty(0),
                "lasting": self._spare > 0,
            }
        )

    def _free_place(self, number: int) -> Place | None:
        """Return a place for the replacement of a rank: on its host if that lives."""
        own = self._where[number].machine
        for machine in sorted(self._cluster.living, key=lambda machine: machine is not own):
            taken = {r.local_rank for r in self._by_process.values() if _is_on(machine, r)}
            if len(taken) < machine.slots and not machine.leaving:
                local = min(set(range(machine.slots)) - taken)
                return Place(machine, local, max(taken | {local}) + 1)
        return None

    def _replaces(self, replacing: Replacing, rank: Rank) -> bool:
        return super()._replaces(replacing, rank) and self._free_place(rank.number) is not None

    # -- events ----------------------------------------------------------------------------

    def _hear(self, machine: Machine) -> None:
        for frame in machine.receive():
            if isinstance(frame, Output):
                rank = self._by_process.get(frame.process)
                if rank is not None:
                    self._show(rank, rank.streams[frame.stream - 1], frame.data)
            else:
                self._learn(machine, frame)
        if machine.lost:
            self._lose(machine)

    def _learn(self, machine: Machine, message: Message) -> None:
        kind = message["kind"]
        if kind == "finished":
            self._finished.add(machine)
        elif kind == "leaving":
            machine.leaving = True
            self._error.fresh_line()
            text = f"collective run: host {machine.name} goes down; its ranks leave\n"
            self._error.write(text.encode())
        elif kind == "beat":
            for number, (cpu_s, runs) in message["activity"].items():
                if (rank := self._by_process.get(int(number))) is not None:
                    rank.look = Activity(cpu_s, runs)
        elif (rank := self._by_process.get(message.get("process", -1))) is not None:
            if kind == "started":
                rank.pid = message["pid"]
                self._pour(rank)
            elif kind == "fed":
                self._pour(rank)
            elif kind == "ended" and rank.runs:
                self._stop_input(rank)
                self._ended(rank, message["code"])

    def _complain(self, machine: Machine) -> None:
        """Show what ssh or the agent of a host has written to standard error."""
        if machine.lost:
            return
        data = machine.complaints()
        if not data:  # the end of the stream
            self._selector.unregister(machine.errors)
            return
        self._error.fresh_line()
        for line in data.splitlines():
            self._error.write(b"collective run: host %s: %s\n" % (machine.name.encode(), line))

    def _lose(self, machine: Machine) -> None:
        """End the ranks of a host that is lost, and tell the other ranks."""
        for descriptor in (machine.channel.incoming, machine.errors):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        self._sources.pop(machine.channel.incoming, None)
        ranks = [rank for rank in self._by_process.values() if _is_on(machine, rank)]
        self._announce([(machine.hello["processes"], rank.pid) for rank in ranks])
        for rank in ranks:
            self._lose_rank(rank)

    def _lose_rank(self, rank: HostRank) -> None:
        rank.fate = f"host {rank.machine.name} is lost: {rank.machine.lost}"
        self._stop_input(rank)
        self._ended(rank, -signal.SIGKILL)

    def _time_left(self) -> float | None:
        left = super()._time_left()
        return self._beat.left() if left is None else min(left, self._beat.left())

    def _keep_schedule(self) -> None:
        super()._keep_schedule()
        if not self._beat.expired:
            return
        self._look_for_failing()
        # If the screen was full, or this process was stopped, nobody has listened to the hosts.
        now = time.monotonic()
        deaf = now - self._looked > 4 * BEAT_S or self._out.full or self._error.full
        self._looked, self._beat = now, Deadline(BEAT_S)
        self._cluster.beat()
        if deaf:
            for machine in self._cluster.living:
                machine.pulse.hear()
            return
        silent = [machine for machine in self._cluster.living if machine.pulse.is_silent()]
        lost = {*silent, *self._cut_off()}
        for machine in lost:
            machine.lose("it is silent")
        for machine in lost:
            self._lose(machine)

    def _cut_off(self) -> list[Machine]:
        """Return the hosts to give up early, because the other ranks can go on without them."""
        remote = [machine for machine in self._cluster.living if not machine.local]
        found = [machine for machine in remote if machine.pulse.is_cut_off()]
        if len(remote) > 1 and found == remote:
            return []  # rather this host's own network is gone, perhaps for a moment
        lost = sum(rank.runs and rank.machine in found for rank in self._by_process.values())
        return found if self._left() - lost >= self._least else []

    # -- standard input ----------------------------------------------------------------------

    def _pour(self, rank: HostRank) -> None:
        """Read standard input for rank 0, which has read all so far."""
        if rank is self._ranks[0] and not os.isatty(0) and 0 not in self._selector.get_map():
            self._watch(0, partial(self._pass_input, rank))

    def _pass_input(self, rank: HostRank) -> None:
        self._stop_input(rank)
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(0, _READ)
        if not rank.machine.lost:
            rank.machine.channel.post(Output(rank.process, 0, data))

    def _stop_input(self, rank: HostRank) -> None:
        if rank is self._ranks[0] and 0 in self._selector.get_map():
            self._selector.unregister(0)

    # -- the end -----------------------------------------------------------------------------

    def _end_processes(self, patience: float) -> None:
        self._finished.clear()
        for machine in self._cluster.living:
            machine.channel.post({"kind": "finish", "patience": patience})
        deadline = Deadline(2 * patience + _FINISH_S)
        while set(self._cluster.living) - self._finished and not deadline.expired:
            self._step()
        for machine in self._cluster.living:
            if machine not in self._finished:
                machine.lose("it did not end what the ranks have left")
                self._lose(machine)

    def _drain(self) -> None:
        for rank in self._ranks:
            for stream in rank.streams:
                stream.finish()
        super()._drain()


def _is_on(machine: Machine, rank: HostRank) -> bool:
    return rank.machine is machine and rank.runs


def _at(place: Place, size: int) -> dict[str, str]:
    """Return the variables that differ for a process which joins at another place."""
    # A process whose host has all ranks would not listen on a network.
    most = max(1, size - 1)
    local_size = min(place.local_size, most)
    local = str(min(place.local_rank, local_size - 1))
    return {
        "COLLECTIVE_LOCAL_RANK": local,
        "COLLECTIVE_LOCAL_SIZE": str(local_size),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": str(local_size),
    }
