"""Arrays over shared memory that a program keeps: the last array keeps the memory mapped.

A read of unmapped memory would end the process. So these tests check which memory is mapped, and
write to it.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.launches import launches  # noqa: F401
from tests.support.on_ranks import on_ranks, ranks_of

torch = pytest.importorskip("torch")

from collective.adapters.torch import DistributedDataParallel  # noqa: E402

N = 1000


two = ranks_of(("shm", 2))


def segments() -> dict[tuple[int, int], str]:
    """Return the inodes of the mapped shared segments, by address range."""
    inodes = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:collective" in line:
            extent, _, _, _, inode, *_ = line.split()
            start, stop = (int(end, 16) for end in extent.split("-"))
            inodes[start, stop] = inode
    return inodes


def segment_of(array: Any) -> str | None:
    """Return the inode of the segment that contains a NumPy array, or None."""
    low = array.__array_interface__["data"][0]
    high = low + array.nbytes
    return next((i for (a, b), i in segments().items() if a <= low and high <= b), None)


@pytest.mark.parametrize("end", ["closed", "dropped", "aborted"])
@pytest.mark.parametrize("like", ["numpy", "torch"])
@on_ranks("two")
def test_array_outlives_its_communicator(comm: Any, like: str, end: str) -> None:
    group = comm.dup()
    memory = group.empty(N, like=like)
    memory[...] = 1.0
    group.all_reduce(memory, out=memory)
    array = np.asarray(memory)[10:]
    segment = segment_of(array)
    assert segment is not None
    if end == "closed":
        group.close()
    elif end == "aborted":
        group.abort("enough")
    gone = weakref.ref(group)
    del group, memory
    gc.collect()
    assert gone() is None
    comm.barrier()  # the communicator of the peer is gone, too
    assert segment_of(array) == segment
    assert (array == 2.0).all()
    array[:] = 3.0
    del array
    gc.collect()
    assert segment not in segments().values()


class Backwards(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Module that uses its layers in reverse order of their creation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(50, 50, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@on_ranks("two")
def test_array_over_gradient_outlives_wrapper(comm: Any) -> None:
    group, model = comm.dup(), Backwards()
    x = torch.full((2, 50), comm.rank + 1.0)
    model(x).sum().backward()
    ordinary = model.layers[0].weight.grad.numpy()  # a gradient from before the wrapper
    ddp = DistributedDataParallel(model, group, bucket_mib=0.001)
    arrays: list[Any] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: arrays.append(p.grad.numpy()))
    ddp(x).sum().backward()
    value = ordinary.copy()
    addresses = {array.__array_interface__["data"][0] for array in arrays[::2]}
    after = {p.grad.data_ptr() for p in list(model.parameters())[::2]}
    assert addresses == after, "the test is void: the gradients have another layout"
    first = arrays[0].__array_interface__["data"][0]
    assert model.layers[0].weight.grad.data_ptr() != first, "the test is void: nothing has moved"
    ddp.zero_grad()
    ddp(x).sum().backward()
    segment = segment_of(arrays[0])
    assert segment is not None
    group.close()
    gone = weakref.ref(ddp._gradients)
    del ddp, model, group, parameter
    gc.collect()
    assert gone() is None
    for array in arrays:
        assert segment_of(array) == segment
        array[:] = 3.0
    assert (ordinary == value).all()
    del array
    arrays.clear()
    gc.collect()
    assert segment not in segments().values()


def test_array_stays_valid_during_process_exit(launches: Any) -> None:  # noqa: F811
    program = launches.script("""
        import atexit
        import numpy as np

        class Last:
            def __del__(self):
                self.array += 1  # when the modules are taken down
                os.write(1, f"{self.array.sum():g}\\n".encode())

        def late():
            last.array += 1
            print(f"{last.array.sum():g}", flush=True)

        last = Last()
        atexit.register(late)  # called after what is registered from here on
        import collective
        comm = collective.init()
        memory = comm.empty(1000)
        memory[:] = 1
        last.array = memory[10:]
        del memory
        """)
    result = launches.run("-n", "2", "--backend", "shm", program)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.split("\n")) == [
        "",
        *(f"[{r}] {n}" for r in (0, 1) for n in (1980, 2970)),
    ]
