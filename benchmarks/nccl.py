"""Measurement of the host time that our calls add to those of NCCL: ``python benchmarks/nccl.py``.

There is one rank, so no call waits for a peer, and calls only enqueue. The figure is the time until
a call returns. One side is NCCL's function through ctypes with its arguments ready, the other side
is our call on an array. They take turns in one process, as in ``overhead.py``.

Without ``--real``, the library is the ABI fake of the tests (delay 0, no log). The fake also
enqueues, and executes nothing before the end of a turn. PyTorch's tensors are stand-ins that only
report that they are on a GPU. The figures are then processor time of the calling thread, so that
other programs do not count. They show the cost of our code and not that of NCCL. ``--real`` uses
the installed NCCL, a GPU, PyTorch or CuPy, CuPy's own binding as a third side, and wall-clock time.

``--layers`` shows the time by layer: NCCL's function, our engine, the transport, the call.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from turns import alternate, median_excess, median_ratio, repeated

from collective.deadline import Deadline
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, microseconds, print_table

_ROOT = Path(__file__).resolve().parent.parent
# Promised bound: microseconds added to the raw binding.
_ADDED_US = 6.0
_COUNT = 1024
_FLOAT32, _SUM, _BYTES = 7, 0, 4 * _COUNT

Request = Callable[[], object]


class _Alone:
    """Stand-in for the communicator of :func:`alternate`, for one rank.

    Args:
        stream: stream that must be idle before a turn begins.
        hold: function that stops the fake from executing work (1), or lets it continue (0). Work
            in the fake's thread during a turn would disturb the figures.
    """

    def __init__(self, stream: Any, hold: Callable[[int], object]) -> None:
        self._stream = stream
        self._hold = hold

    def barrier(self) -> None:
        gc.collect()
        self._hold(0)
        self._stream.synchronize()
        self._hold(1)

    def all_reduce(self, seconds: Any, op: str) -> Any:
        return seconds


class _Bench:
    """Communicator of one rank, with access to the NCCL underneath it."""

    def __init__(self, stream: Any) -> None:
        import collective
        from collective import cuda

        self.comm = collective.init("nccl")
        self.device = cuda.device(0)
        self.stream = stream
        x = _device_array(self)
        self.comm.all_reduce(x, out=x)  # creates NCCL's communicator
        backend: Any = self.comm.inner.transport
        self.engine = backend._comm
        self.library = self.engine.library
        self._kept: list[Any] = []

    def raw(self, x: int, y: int, stream: int | None = None) -> dict[str, Request]:
        """Return NCCL's own calls on two addresses."""
        comm, function = self.engine.handle, self.library.function
        stream = self.stream.handle if stream is None else stream
        fold, copy, join = map(function, ("ncclAllReduce", "ncclBroadcast", "ncclAllGather"))

        def all_reduce(to: int) -> Request:
            return lambda: fold(x, to, _COUNT, _FLOAT32, _SUM, comm, stream)

        return {
            "all_reduce(x, out=x)": all_reduce(x),
            "all_reduce(x, out=y)": all_reduce(y),
            "all_reduce(x)": all_reduce(y),
            "broadcast(x, out=x)": lambda: copy(x, x, _BYTES, 1, 0, comm, stream),
            "all_gather(x, counts=, out=y)": lambda: join(x, y, _BYTES, 1, comm, stream),
        }

    def raw_overlapped(self, x: int, y: int) -> dict[str, Request]:
        """Return the same on a second stream, with the fewest events that this needs."""
        from collective import cuda

        driver, here = cuda.driver(), self.stream.handle
        second, before, after = (
            self.device.new_stream(),
            self.device.new_event(),
            self.device.new_event(),
        )
        record, wait, there = driver.cuEventRecord, driver.cuStreamWaitEvent, second.handle
        self._kept.append(second)

        def around(enqueue: Request) -> Request:
            def call() -> None:
                record(before, here)
                wait(there, before, 0)
                enqueue()
                record(after, there)
                wait(here, after, 0)

            return call

        return {name: around(call) for name, call in self.raw(x, y, there).items()}

    def ours(self, x: Any, y: Any, **how: Any) -> dict[str, Request]:
        """Return the same calls of ours on two arrays."""
        comm, counts = self.comm, [_COUNT]
        return {
            "all_reduce(x, out=x)": partial(comm.all_reduce, x, out=x, **how),
            "all_reduce(x, out=y)": partial(comm.all_reduce, x, out=y, **how),
            "all_reduce(x)": partial(comm.all_reduce, x, **how),
            "broadcast(x, out=x)": partial(comm.broadcast, x, out=x, **how),
            "all_gather(x, counts=, out=y)": partial(
                comm.all_gather, x, counts=counts, out=y, **how
            ),
        }

    def asynchronous(self, x: Any, y: Any) -> dict[str, Request]:
        """Return the same with ``async_op=True``, followed by ``wait()``."""

        def waited(begin: Any) -> Request:
            return lambda: begin().wait()

        return {name: waited(call) for name, call in self.ours(x, y, async_op=True).items()}

    def layers(self, x: Any, x_address: int) -> dict[str, Request]:
        """Return an all-reduce in place at each of our layers, the lowest first."""
        from collective.memory.buffer import Buffer
        from collective.memory.dtypes import BY_NAME
        from collective.ops import as_op
        from collective.request import Request

        engine, stream, backend = self.engine, self.stream.handle, self.comm.inner.transport
        dtype, op = BY_NAME["float32"], as_op("sum")
        buffer = Buffer(_device_array(self), dtype)
        plan = backend.plan(Request("all_reduce", dtype, (_COUNT,), op=op))
        return {
            "NCCL's function": self.raw(x_address, x_address)["all_reduce(x, out=x)"],
            "engine (NcclComm.all_reduce)": lambda: engine.all_reduce(
                x_address, x_address, _COUNT, _FLOAT32, _SUM, stream
            ),
            "transport (event, watch)": lambda: plan(buffer, buffer, Deadline(300.0)),
            "call (recorder, arrays)": lambda: self.comm.all_reduce(x, out=x),
        }


def _nothing(_: int) -> None:
    """Do nothing, since the real NCCL cannot be stopped."""


def _fakes_hold() -> Callable[[int], object]:
    fake = importlib.import_module("tests.fakes").Fake()
    return lambda value: fake.knob("hold", value)


def _device_array(bench: _Bench) -> Any:
    from collective import cuda
    from collective.memory.device_array import DeviceArray

    memory = cuda.allocate(bench.device, _BYTES, bench.stream)
    return DeviceArray(
        memory.address, (_COUNT,), "float32", bench.device, bench.stream, owner=memory
    )


def _stand_in(bench: _Bench) -> Callable[[], Any]:
    """Return a function that makes tensors which claim to be on a GPU, with PyTorch for CPUs."""
    import torch

    from collective import cuda
    from collective.adapters.torch import cuda_arrays

    class Tensor(torch.Tensor):
        # Otherwise each access to an attribute would go through Python.
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
            raise NotImplementedError(f"{function}: it only says where it is")

        def data_ptr(self) -> int:
            address: int = vars(self)["address"]
            return address

    def allocate(shape: Any, kind: Any, device: Any) -> Any:
        tensor: Any = torch.Tensor._make_wrapper_subclass(
            Tensor, shape, dtype=kind, device=torch.device("cuda", device.ordinal)
        )
        tensor.memory = cuda.allocate(device, tensor.nbytes, bench.stream)
        tensor.address = tensor.memory.address
        return tensor

    handle = bench.stream.handle
    cuda_arrays._current_handle = lambda ordinal: handle
    cuda_arrays._allocate = allocate
    return lambda: allocate((_COUNT,), torch.float32, bench.device)


def _makers(bench: _Bench, real: bool) -> dict[str, Callable[[], Any]]:
    """Return functions that make arrays, for each kind that is available here."""
    makers: dict[str, Callable[[], Any]] = {"DeviceArray": lambda: _device_array(bench)}
    try:
        import torch

        if not real:
            makers["torch (stand-in)"] = _stand_in(bench)
        elif torch.cuda.is_available():
            makers["torch"] = lambda: torch.zeros(_COUNT, device="cuda:0")
    except ImportError:
        pass
    if real:
        try:
            import cupy

            makers["cupy"] = lambda: cupy.zeros(_COUNT, "float32")
        except ImportError:
            pass
    return makers


def _address(x: Any) -> int:
    from collective.memory.arrays import adapter_of

    address: int = adapter_of(x).view(x)[0].address
    return address


def _cupys() -> Callable[[int, int, int], Request] | None:
    """Return a function that makes CuPy's all-reduce call on two addresses; None without CuPy."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return None
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    code, op = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
    return lambda x, y, stream: lambda: comm.allReduce(x, y, _COUNT, code, op, stream)


def measure(real: bool, quick: bool) -> dict[str, Any]:
    """Return one record for each operation, kind of array and way of calling."""
    from collective import cuda

    # With a GPU, use the default stream, as PyTorch and CuPy do.
    device = cuda.device(0)
    stream = device.stream(0) if real else device.new_stream()
    bench = _Bench(stream)
    alone = _Alone(stream, _nothing if real else _fakes_hold())
    rounds, turn = (3, 0.005) if quick else (25, 0.02)
    clock = time.perf_counter if real else time.thread_time
    makers = _makers(bench, real)
    gc.disable()  # as timeit does; _Alone.barrier() collects between the turns
    gc.freeze()
    rival = _cupys() if real else None
    records, layers = [], []
    for kind, make in makers.items():
        x, y = make(), make()
        ends = _address(x), _address(y)
        ways = {
            "sync": (bench.raw(*ends), bench.ours(x, y)),
            "async": (bench.raw_overlapped(*ends), bench.asynchronous(x, y)),
        }
        for way, (raw, calls) in ways.items():
            for operation, call in calls.items():
                sides = {"raw": repeated(raw[operation]), "ours": repeated(call)}
                if rival is not None and operation.startswith("all_reduce"):
                    to = x if "out=x" in operation else y
                    sides["cupy"] = repeated(rival(_address(x), _address(to), stream.handle))
                times = alternate(alone, sides, rounds, turn, clock=clock)
                medians = {side: statistics.median(each) for side, each in times.items()}
                records.append(
                    {
                        "operation": operation,
                        "arrays": kind,
                        "way": way,
                        "raw": medians["raw"],
                        "ours": medians["ours"],
                        "added": median_excess(times["ours"], times["raw"]),
                        "least": min(times["ours"]) - min(times["raw"]),
                        "ratio": median_ratio(times["ours"], times["raw"]),
                        "cupy": medians.get("cupy"),
                    }
                )
        steps = {name: repeated(each) for name, each in bench.layers(x, _address(x)).items()}
        for name, each in alternate(alone, steps, rounds, turn, clock=clock).items():
            layers.append({"arrays": kind, "layer": name, "seconds": statistics.median(each)})
    if not real:
        _fakes_hold()(0)
    found = {"real": real, "library": bench.library.text, "records": records, "layers": layers}
    bench.comm.close()
    return found


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"


def show(run: dict[str, Any], layers: bool) -> None:
    """Print the tables of a run."""
    print(f"{headline(run['machine'])}; 1 rank\n")
    which = "NCCL" if run["real"] else "the ABI fake of NCCL"
    rows = [
        [
            record["operation"], record["arrays"], record["way"], microseconds(record["raw"]),
            microseconds(record["ours"]), _us(record["added"]), _us(record["least"]),
            f"{record['ratio']:.1f}",
            microseconds(record["cupy"]) if record["cupy"] is not None else "–",
            "kept" if record["added"] * 1e6 <= _ADDED_US else "missed",
        ]
        for record in run["records"]
    ]  # fmt: skip
    header = ["operation", "arrays", "way", "raw µs", "ours µs", "added µs", "least added µs"]
    title = f"per call on the host, over {which} {run['library']}; {_ADDED_US:g} µs may be added"
    print_table(title, [*header, "ratio", "CuPy µs", "verdict"], rows)
    if layers:
        rows, before = [], 0.0
        for layer in run["layers"]:
            first = layer["layer"].startswith("NCCL")
            more = layer["seconds"] - (0.0 if first else before)
            before = layer["seconds"]
            rows.append([layer["layer"], layer["arrays"], microseconds(before), _us(more)])
        header = ["layer", "arrays", "µs", "adds µs"]
        print_table("all_reduce(x, out=x), layer by layer", header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Measure what our calls add to NCCL's on the host."
    )
    parser.add_argument("--real", action="store_true", help="NCCL on a GPU, and CuPy's binding")
    parser.add_argument("--layers", action="store_true", help="also show the time by layer")
    parser.add_argument("--quick", action="store_true", help="three short turns of each side")
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)
    if options.earlier is None and not options.real:
        sys.path.insert(0, str(_ROOT))
        fakes = importlib.import_module("tests.fakes")
        if fakes.compiler() is None:
            raise SystemExit("nccl: the ABI fake needs a C compiler; or use --real on a GPU")
        os.environ.update(fakes.environment(delay_us=0, log=0, poison=0))
    run = measured(options, lambda: measure(options.real, options.quick))
    show(run, options.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
