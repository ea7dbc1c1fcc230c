"""Cliques of XLA: the groups of processes that exchange data in a compiled program.

XLA makes a communicator for a clique when a program first needs it, and keeps it in a cache by the
clique's devices. It does so by ``MPI_Comm_split`` with the first device of the clique and this
process's place in it, and without its size. So two cliques with one first device look alike: in
such a call ``{0, 1}`` cannot be told from ``{0, 1, 2}``. A guess could give wrong numbers.

So the plug-in does not guess. After each compilation it reads the groups of devices from the
compiled program. For each new group it *announces* the clique: it runs a small program over exactly
these devices, so that XLA makes the communicator at a moment when the plug-in knows the clique. The
small program adds up a number, which the plug-in recognises and answers without sending anything. A
communicator that XLA makes at another moment is refused by name.
"""

from __future__ import annotations

import importlib
import random
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from collective import BackendError, UnsupportedError

from .replica_groups import device_groups

#: Name of the small program; the plug-in does not read its groups.
ANNOUNCEMENT = "collective_announcement"

# Each process adds a number that depends on its place, or XLA would compute the sum by itself.
_PROGRAM = """
module @{name} attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {size} : i32}} {{
  func.func public @main() -> tensor<i32> {{
    %place = stablehlo.replica_id : tensor<ui32>
    %own = stablehlo.convert %place : (tensor<ui32>) -> tensor<i32>
    %token = stablehlo.constant dense<{token}> : tensor<i32>
    %sum = stablehlo.add %own, %token : tensor<i32>
    %result = "stablehlo.all_reduce"(%sum) ({{
      ^bb0(%a: tensor<i32>, %b: tensor<i32>):
        %c = stablehlo.add %a, %b : tensor<i32>
        stablehlo.return %c : tensor<i32>
      }}) {{replica_groups = dense<{groups}> : tensor<{shape}xi64>}}
      : (tensor<i32>) -> tensor<i32>
    return %result : tensor<i32>
  }}
}}
"""


class Cliques(Protocol):
    """Part of the plug-in that makes communicators."""

    def check(self) -> None:
        """Raise the error that has ended the connection of the ranks, if any."""

    def announce(self, color: int, ranks: Sequence[int], token: int) -> None:
        """Expect a communicator of ``ranks``, and then an addition of ``token`` over it."""

    def announced(self) -> bool:
        """End the announcement; return whether both have come."""


class Announcer:
    """Function in place of JAX's ``compile_or_get_cached``, which announces the cliques.

    Args:
        compile_program: JAX's function.
        cliques: part of the plug-in that makes communicators.
        place: number of this process and number of processes when the plug-in connected them.
    """

    def __init__(self, compile_program: Any, cliques: Cliques, place: tuple[int, int]) -> None:
        self._compile = compile_program
        self._cliques = cliques
        self._place = place
        # XLA keeps its communicators as long as the backend. jax.clear_backends() or a second
        # jax.distributed.initialize() leads to another backend, whose cliques are new.
        self._known: weakref.WeakKeyDictionary[Any, set[tuple[int, ...]]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.RLock()

    def __call__(
        self, backend: Any, computation: Any, devices: Any, options: Any, *args: Any, **kwargs: Any
    ) -> Any:
        executable = self._compile(backend, computation, devices, options, *args, **kwargs)
        devices = np.asarray(devices, object)
        if backend.platform == "cpu" and devices.size > 1:
            shape = options.num_replicas, options.num_partitions
            self._announce(backend, executable, devices.reshape(shape))
        return executable

    def _announce(self, backend: Any, executable: Any, devices: Any) -> None:
        by_number = {device.id: device for device in devices.ravel()}
        here = executable.local_devices()
        groups = self._groups(executable, devices)
        if not groups:
            return
        self._cliques.check()
        self._check_place(backend)
        if len(here) > 1:
            raise UnsupportedError(
                f"jax: this process has {len(here)} devices in one program; the plug-in for XLA "
                "needs one device for each process. Start more processes, and remove "
                "xla_force_host_platform_device_count and jax_num_cpu_devices."
            )
        with self._lock:
            known = self._known.setdefault(backend, set())
            for group in groups:
                members = [by_number[number] for number in group]
                if tuple(group) not in known and here[0] in members:
                    others = [device for device in by_number.values() if device not in members]
                    self._make(backend, members, others)
                    known.add(tuple(group))

    def _check_place(self, backend: Any) -> None:
        """Check that this process has the number that it had when the plug-in connected it."""
        place = backend.process_index(), len({device.process_index for device in backend.devices()})
        if place != self._place:
            raise UnsupportedError(
                f"jax: this process is process {place[0]} of {place[1]} now, and was process "
                f"{self._place[0]} of {self._place[1]} when the plug-in for XLA connected the "
                "processes, which it does once. Initialize jax.distributed again with the same "
                "process_id and num_processes, or start new processes."
            )

    def _groups(self, executable: Any, devices: Any) -> list[list[int]]:
        text = "\n".join(module.to_string() for module in executable.hlo_modules())
        assignment = np.vectorize(lambda device: device.id, otypes=[np.int64])(devices)
        return device_groups(text, assignment)

    def _make(self, backend: Any, members: Sequence[Any], others: Sequence[Any]) -> None:
        """Run the small program over ``members``, so that XLA makes their communicator now.

        Args:
            others: the other devices of the program.
        """
        token = random.SystemRandom().randrange(1 << 20, 1 << 30)
        place = next(i for i, device in enumerate(members) if device in backend.local_devices())
        ranks = [device.process_index for device in members]
        self._cliques.announce(members[0].id, ranks, token + place)
        try:
            executable = self._compiled(backend, members, others, token)
            for array in executable.execute_sharded([]).disassemble_into_single_device_arrays():
                for part in array:
                    part.block_until_ready()
        finally:
            is_known = self._cliques.announced()
        if not is_known:
            raise BackendError(
                f"jax: XLA did not make a communicator for processes {ranks} when the plug-in "
                "announced them. Another part of the program may have made it before. Let JAX "
                "compile the program instead of loading an executable.",
                "jax",
            )

    def _compiled(
        self, backend: Any, members: Sequence[Any], others: Sequence[Any], token: int
    ) -> Any:
        compiler = importlib.import_module("jax._src.compiler")
        mlir = importlib.import_module("jax._src.interpreters.mlir")
        ir = importlib.import_module("jax._src.lib.mlir").ir
        client = importlib.import_module("jax._src.lib").xla_client
        devices, groups = list(members), [list(range(len(members)))]
        if len(members) == 1:
            # XLA leaves out a sum in a program of one device, so take another device, which makes
            # no call.
            devices, groups = [members[0], others[0]], [[0], [1]]
        size = len(devices)
        options = compiler.get_compile_options(
            num_replicas=size, num_partitions=1,
            device_assignment=np.array(devices, object).reshape(size, 1), backend=backend,
        )  # fmt: skip
        text = _PROGRAM.format(
            name=ANNOUNCEMENT, size=size, token=token, groups=groups,
            shape=f"{len(groups)}x{len(groups[0])}",
        )  # fmt: skip
        with mlir.make_ir_context():
            return self._compile(
                backend, ir.Module.parse(text), np.array(devices, object), options, [],
                client.DeviceList(tuple(devices)),
            )  # fmt: skip


def install(cliques: Cliques) -> None:
    """Have the cliques of every program announced that JAX compiles from now on."""
    compiler: Any = importlib.import_module("jax._src.compiler")
    state = importlib.import_module("jax._src.distributed").global_state
    if not isinstance(compiler.compile_or_get_cached, Announcer):
        compiler.compile_or_get_cached = Announcer(
            compiler.compile_or_get_cached, cliques, (state.process_id, state.num_processes)
        )
