"""What a program may set for its whole process: it is respected, or does not matter."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("collective.adapters.chainer.optimizer")

import chainer
import chainer.functions as F
import chainer.links as L
import torch

import collective
from collective.adapters import chainer as ours
from collective.adapters import torch as theirs
from collective.training import compression
from collective.training.gradients import Gradients, Parameter
from tests.support.chainer_ranks import run
from tests.support.interpreter import ROOT, run_python
from tests.support.torch_groups import run_in_group

# -- settings -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _set(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextlib.contextmanager
def _warnings_as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def _low_recursion_limit() -> Iterator[None]:
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    with _set(sys.setrecursionlimit, depth + 120, sys.getrecursionlimit()):
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    # The fill of uninitialised memory is on by default then.
    with _set(torch.use_deterministic_algorithms, True, False):
        yield


def _default_device(name: str) -> AbstractContextManager[None]:
    return _set(torch.set_default_device, name, None)


def _default_dtype(dtype: Any) -> AbstractContextManager[None]:
    return _set(torch.set_default_dtype, dtype, torch.get_default_dtype())


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device meta": lambda: _default_device("meta"),
    "device context meta": lambda: torch.device("meta"),
    "default device cpu": lambda: _default_device("cpu"),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
    "deterministic algorithms": _deterministic,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "NumPy raises": lambda: np.errstate(all="raise"),
    "NumPy prints as long ago": lambda: np.printoptions(legacy="1.13", precision=1, threshold=3),
    "warnings as errors": _warnings_as_errors,
    "short switch interval": lambda: _set(sys.setswitchinterval, 1e-6, sys.getswitchinterval()),
    "no garbage collection": lambda: _set(lambda on: gc.enable() if on else gc.disable(), 0, 1),
    "low recursion limit": _low_recursion_limit,
    "Chainer's dtype": lambda: chainer.using_config("dtype", np.float16),
    "Chainer's iDeep": lambda: chainer.using_config("use_ideep", "auto"),
    "Chainer's debug mode": lambda: chainer.using_config("debug", True),
}


# -- programs -------------------------------------------------------------------------------------


def _network() -> Any:
    exact: Any = {"device": "cpu", "dtype": torch.float32}
    layers = torch.nn.Linear(4, 8, **exact), torch.nn.BatchNorm1d(8, **exact)
    network = torch.nn.Sequential(*layers, torch.nn.Linear(8, 2, **exact))
    for parameter in network.parameters():
        values = np.linspace(-1, 1, parameter.numel(), dtype="f").reshape(parameter.shape)
        parameter.data.copy_(torch.from_numpy(values))
    return network


def _samples(rank: int) -> Any:
    return torch.from_numpy(np.random.RandomState(rank).rand(6, 4).astype("f"))


def wrapped(comm: Any, **options: Any) -> list[Any]:
    network = _network()
    model = theirs.DistributedDataParallel(network, comm, **options)
    optimizer = theirs.ShardedOptimizer(network.parameters(), torch.optim.Adam, comm, lr=0.1)
    for _ in range(2):
        if "shards" in options:
            for _ in model.each_shard():
                model(_samples(0)).sum().backward()
        else:
            optimizer.zero_grad()
            model(_samples(comm.rank)).sum().backward()
        optimizer.step()
    return [*network.parameters(), *network.buffers()]


def shards(comm: Any) -> list[Any]:
    return wrapped(comm, shards=3)


def compressed(comm: Any) -> list[Any]:
    reduces = [compression.Cast(comm), compression.TopK(comm, 0.5), compression.PowerSGD(comm, 1)]
    return [value for reduce in reduces for value in wrapped(comm, reduce=reduce)]


def layers(comm: Any) -> list[Any]:
    network = theirs.convert_sync_batchnorm(_network(), comm)
    network(_samples(comm.rank)).sum().backward()
    convolution = torch.nn.Conv2d(1, 2, 3, padding=1, device="cpu", dtype=torch.float32)
    for parameter in convolution.parameters():
        parameter.data.fill_(0.5)
    split = theirs.Split(convolution, data=(2,), comm=comm)
    image = torch.from_numpy(np.ones((2, 1, 8, 8), "f"))
    split(image).sum().backward()
    copies = theirs.DataParallel(_network(), devices=["cpu"] * 2)
    copies(_samples(0)).sum().backward()
    parts = network, convolution, copies
    return [parameter.grad for part in parts for parameter in part.parameters()]


def functions(comm: Any) -> list[Any]:
    calls = theirs.functional
    x = torch.from_numpy(np.arange(4, dtype="f") + comm.rank).requires_grad_()
    results = [
        calls.all_reduce(x, comm), calls.all_reduce(x, comm, "prod"), calls.broadcast(x, comm),
        calls.all_gather(x, comm), calls.reduce_scatter(x, comm), calls.all_to_all(x, comm),
    ]  # fmt: skip
    for result in results:
        result.sum().backward()
    exact = {"device": "cpu", "dtype": torch.float32, "check_invariants": False}
    places, ones = torch.from_numpy(np.array([[0, 2]])), torch.from_numpy(np.ones(2, "f"))
    sparse = torch.sparse_coo_tensor(places, ones, (4,), **exact)
    return [*results, x.grad, theirs.all_reduce_sparse(sparse, comm).to_dense()]


def data(comm: Any) -> list[Any]:
    batches = [torch.from_numpy(np.arange(4.0) + step) for step in range(3)]
    return [
        *theirs.PrefetchLoader(batches, device="cpu"),
        np.array(list(theirs.ShardedSampler(20, comm, seed=1))),
        np.concatenate(list(ours.ShardedIterator(range(20), 4, comm, repeat=False, seed=1))),
        np.array(list(ours.scatter_dataset(list(range(9)), comm, shuffle=True, seed=1))),
    ]


def chainers(comm: Any) -> list[Any]:
    with chainer.using_config("dtype", np.float32):
        link = chainer.Sequential(
            L.Linear(4, 3, initialW=0.5), ours.SyncBatchNormalization(3, comm), F.tanh
        )
        plain = chainer.Sequential(L.Linear(4, 3, initialW=0.5), L.BatchNormalization(3), F.tanh)
        stage = L.Linear(4, 4, initialW=0.5)
    x = _samples(comm.rank).numpy()
    for net, options in ((link, {}), (plain, {"shards": 3, "check": True})):
        adam = chainer.optimizers.Adam(0.1)
        optimizer = ours.create_multi_node_optimizer(adam, comm, **options).setup(net)
        for _ in range(2):
            optimizer.update(lambda *_, net=net: F.sum(net(x)))
    pipe = ours.Pipeline([stage] if comm.size == 1 else [stage, None][:: 1 - 2 * comm.rank], comm,
                         microbatches=2)  # fmt: skip
    stage.cleargrads()
    pipe.step(x, np.zeros(6, np.int32), F.softmax_cross_entropy)
    parts = link, plain
    return [*(p.array for part in parts for p in part.params()), stage.W.grad]


def extremes(comm: Any) -> list[Any]:
    """Reduce values whose sums overflow or underflow, on all ways that fold them in NumPy."""
    results = []
    part = collective.Shards(3, comm)
    for kind in map(np.dtype, ("f2", "f4", "f8", "i1", "i4", "i8", "u8", "c8")):
        if kind.kind in "iu":
            x = np.full(6, np.iinfo(kind).max, kind)
        else:
            limits = np.finfo(kind)
            x = np.array([limits.max, -limits.max, np.inf, np.nan, limits.tiny, 0]).astype(kind)
        for op in ("sum", "prod"):
            results += [
                comm.all_reduce(x, op=op),
                comm.all_reduce(x, op=op, order="rank"),
                comm.all_reduce(x, op=op, async_op=True).wait(),
                comm.all_reduce(np.tile(x, 9000), op=op),
                comm.reduce_scatter(x, op=op),
                comm.scan(x, op=op),
                comm.all_reduce(np.stack([x] * len(part.mine)), op=op, order=part),
            ]
        if kind.kind != "c":
            results.append(comm.all_reduce(np.full(6, x[0]), op=collective.user_op(np.multiply)))
    return results


def compressed_extremes(comm: Any) -> list[Any]:
    results = []
    cast = compression.Cast(comm, "float16")
    for reduce in (cast, compression.TopK(comm, 0.5), compression.PowerSGD(comm, 1)):
        for value in (3e38, 1e-40, 0.0):
            engine = Gradients(comm, [Parameter("w", (4, 5), "float32")], reduce=reduce)
            with np.errstate(all="ignore"):
                engine.views[0][...] = value / (1 + comm.rank)
            engine.ready(0)
            engine.finish()
            results.append(engine.views[0].copy())
    return results


def objects(comm: Any) -> list[Any]:
    nested = {"é": [1, 2.5, None, b"1", 2**70, (True, {"a": np.arange(3)})]}
    every = comm.all_gather_object(nested), comm.broadcast_object(nested), comm.dup().size
    return [np.array(repr(every))] if np.get_printoptions()["legacy"] is False else []


PROGRAMS = (
    wrapped, shards, compressed, layers, functions, data, chainers, extremes, compressed_extremes,
    objects,
)  # fmt: skip


def _plain(value: Any) -> tuple[str, bytes]:
    if isinstance(value, torch.Tensor):
        assert value.device.type == "cpu"
        value = value.detach().numpy()
    array = np.array(value)
    if array.dtype.kind in "fc":
        array[np.isnan(array)] = 0
    return f"{array.dtype}{array.shape}", array.tobytes()


def _outcomes(comm: Any, setting: str | None) -> list[Any]:
    torch.set_num_threads(1)
    with SETTINGS[setting]() if setting else contextlib.nullcontext():
        results = [program(comm.dup()) for program in PROGRAMS]
    return [list(map(_plain, values)) for values in results]


@functools.cache
def _without() -> list[Any]:
    return run("shm-2", _outcomes, None)


@pytest.mark.parametrize("setting", SETTINGS)
def test_results_do_not_depend_on_setting(setting: str) -> None:
    for found, wanted in zip(run("shm-2", _outcomes, setting), _without(), strict=True):
        for program, values, expected in zip(PROGRAMS, found, wanted, strict=True):
            assert values == expected or not values, program.__name__


# -- settings that switch gradients off -----------------------------------------------------------


@pytest.mark.parametrize("setting", ["inference_mode", "no_grad"])
def test_wrapper_made_without_gradients_trains_afterwards(setting: str) -> None:
    run("shm-2", _made_within, setting)


def _made_within(comm: Any, setting: str) -> None:
    network = _network()
    with getattr(torch, setting)():
        model = theirs.DistributedDataParallel(network, comm)
        optimizer = theirs.ShardedOptimizer(network.parameters(), torch.optim.Adam, comm, lr=0.1)
        model(_samples(comm.rank))
        assert comm.all_reduce(_samples(0)).shape == (6, 4)
    for _ in range(2):
        model(_samples(comm.rank)).sum().backward()
        optimizer.step()


# -- the plug-in ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", ["default device meta", "default dtype bfloat16", "warnings as errors"]
)
def test_plug_in_calls_do_not_depend_on_setting(setting: str) -> None:
    for outcome in run_in_group(("shm", 2), _plug_in, setting):
        assert outcome == [3.0, [1.0, 2.0], 1.0, 2.0, 3.0, ["a", "a"], 3.0]


def _plug_in(rank: int, size: int, setting: str) -> list[Any]:
    import torch.distributed as dist

    with SETTINGS[setting]():
        x = torch.from_numpy(np.full(2, rank + 1, "f"))
        reduced, last, moved = x.clone(), x.clone(), x.clone()
        dist.all_reduce(reduced)
        every = [torch.zeros_like(x) for _ in range(size)]
        dist.all_gather(every, x)
        dist.broadcast(moved, 0)
        dist.barrier()
        other = torch.zeros_like(x)
        for to in (1, 0) if rank else (0, 1):
            dist.send(x, 1 - rank) if to else dist.recv(other, 1 - rank)
        dist.all_to_all_single(scattered := torch.zeros_like(x), x)
        names: list[Any] = [None] * size
        dist.all_gather_object(names, "a")
        dist.all_reduce(last, async_op=True).wait()
    numbers = [reduced[0].item(), [e[0].item() for e in every], moved[0].item()]
    right = other[0].item() == 2 - rank
    return [*numbers, 1.0 + right, scattered.sum().item(), names, last[1].item()]


# -- flags of the interpreter ---------------------------------------------------------------------

_PROGRAM = """
import collective.adapters.chainer
from collective.testing import run_ranks
from tests.adapters.test_process_settings import chainers, extremes, objects

def ranks(comm):
    return len([*chainers(comm), *extremes(comm), *objects(comm)])

print(run_ranks(1, ranks, backend="threads")[0] > 100)
"""


def test_results_do_not_depend_on_flags_of_python() -> None:
    flags = "-OO", "-X", "dev", "-W", "error", "-bb"
    done = run_python(*flags, "-c", _PROGRAM, PYTHONHASHSEED="77", LC_ALL="C")
    assert done.stdout == "True\n", done.stderr


def test_conformance_kit_without_assertions_is_refused() -> None:
    program = "from collective.testing import run_checks; run_checks('threads', (2,))"
    done = run_python("-O", "-c", program)
    assert "UnsupportedError: checks: Python runs with -O" in done.stderr


# -- source ---------------------------------------------------------------------------------------

_FACTORIES = set(
    "arange as_tensor asarray empty empty_strided eye full linspace ones rand randint randn "
    "randperm scalar_tensor sparse_coo_tensor tensor zeros".split()
)


def test_tensors_of_the_library_name_their_device() -> None:
    """A factory of torch without ``device=`` uses the program's default device."""
    unnamed = []
    for path in (ROOT / folder for folder in ("adapters", "backends", "collective/launch")):
        for file in path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and (node.func.value.id, node.func.attr in _FACTORIES) == ("torch", True)
                    and not any(keyword.arg == "device" for keyword in node.keywords)
                ):
                    unnamed.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert unnamed == []
