"""Processes started by Chainer and its programs: Chainer works in them, and failures end them."""

from __future__ import annotations

import ast
import importlib
import io
import pickletools
import textwrap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("collective.adapters.chainer.arrays")

from chainer.training.extensions import snapshot_writers

from collective.adapters.chainer.compatibility import processes
from tests.support.interpreter import printed

pytestmark = pytest.mark.whole

ANEW = pytest.mark.parametrize("method", ["spawn", "forkserver"])


def run(folder: Path, *arguments: str, **files: str) -> str:
    """Write the programs ``files`` to ``folder``, run Python there and return its output."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    options = {"cwd": folder, "merged": True, "OMP_NUM_THREADS": "1"}
    return printed("-W", "error", *arguments, **options)


# -- Chainer in started processes ------------------------------------------------------------

# This program does not mention collective. Like the imagenet example of ChainerMN, it starts
# processes itself.
PROGRAM = """
import multiprocessing, os, sys
import chainer
import numpy as np

class Squares(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 2

    def get_example(self, i):
        return np.full(2, i * i, np.float32), i

def nothing(*x):
    return x

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    first = multiprocessing.Process(target=nothing)
    first.start()
    first.join()
    print(first.exitcode)
"""
# Each worker loads one example and is then replaced.
ITERATING = """
    with chainer.iterators.MultiprocessIterator(
        Squares(), 1, repeat=False, shuffle=False, n_processes=1, shared_mem=99, maxtasksperchild=1
    ) as iterator:
        print([[(int(x[0]), int(i)) for x, i in batch] for batch in iterator])
"""
RUNNER = ["-m", "collective.adapters.chainer"]


@ANEW
def test_spawned_process_of_unmodified_program_runs(method: str, tmp_path: Path) -> None:
    output = run(tmp_path, *RUNNER, "program.py", method, program=PROGRAM + ITERATING)
    assert output == "0\n[[(0, 0)], [(1, 1)]]\n"


def test_spawned_process_of_unmodified_program_in_package_runs(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import chainer\n")
    (package / "program.py").write_text("from . import __name__ as name\n" + PROGRAM)
    assert run(tmp_path, *RUNNER, "-m", "package.program", "spawn") == "0\n"


def test_chainer_workers_run_for_main_module_without_chainer(tmp_path: Path) -> None:
    body = """
    import multiprocessing

    if __name__ == "__main__":
        import collective.adapters.chainer
        import chainer
        import numpy as np
        from chainer.training.extensions import snapshot_writers

        multiprocessing.set_start_method("spawn")
        data = chainer.datasets.TupleDataset([1, 2, 3], [4, 5, 6])
        iterator = chainer.iterators.MultiprocessIterator(
            data, 2, repeat=False, shuffle=False, n_processes=1
        )
        print(list(iterator))
        iterator.finalize()
        for kind in (snapshot_writers.ProcessWriter, snapshot_writers.ProcessQueueWriter):
            writer = kind()
            writer(kind.__name__, ".", {"x": np.arange(3)})
            writer.finalize()
            print(np.load(kind.__name__)["x"].tolist())
    """
    lines = run(tmp_path, "program.py", program=body).splitlines()
    assert lines == ["[[(1, 4), (2, 5)], [(3, 6)]]", *["[0, 1, 2]"] * 2]


def test_pickled_process_names_adapter_module_before_chainer() -> None:
    updater = importlib.import_module("chainer.training.updaters.multiprocess_parallel_updater")
    # The worker's own __init__ needs a GPU, so only Process.__init__ runs.
    worker = updater._Worker.__new__(updater._Worker)
    processes.Process.__init__(worker)
    pickled = io.BytesIO()
    # The _config holds an authentication key, which can be pickled only while a process starts.
    worker.__dict__["_config"] = {}
    ForkingPickler(pickled).dump(worker)
    strings = [text for _, text, _ in pickletools.genops(pickled.getvalue()) if text]
    names = [text for text in strings if str(text).startswith(("chainer", "collective"))]
    assert names[0] == processes.__name__
    assert any(name.startswith("chainer.") for name in names)


def test_runner_leaves_first_import_of_chainer_to_program(tmp_path: Path) -> None:
    body = """
    import os, sys
    print([name for name in sys.modules if name.startswith("chainer")])
    os.environ["CHAINER_DTYPE"] = "float64"
    import chainer
    print(chainer.config.dtype, os.path.isabs(__file__), __spec__.parent == "")
    """
    assert run(tmp_path, *RUNNER, "program.py", program=body) == "[]\nfloat64 True True\n"


# -- pools and writers that fail -------------------------------------------------------------

FAILING = """
import os, signal, sys
import collective.adapters.chainer
import chainer
import numpy as np
from chainer.training.extensions import snapshot_writers

class Numbers:
    def __init__(self, failure):
        self.failure = failure

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 4:
            self.failure()
        return int(i)

def exits():
    sys.exit(0)

def dies(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def raises(*args):
    raise LookupError("of example 4")

class Unreadable:
    \"\"\"Cannot be made in another process; notes who tried.\"\"\"

    def __reduce__(self):
        return note, ()

def note():
    with open("tried", "a") as file:
        file.write("x")
    raise LookupError("not here")

def next_of(iterator):
    try:
        return next(iterator)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def outcome(failure, **options):
    iterator = chainer.iterators.MultiprocessIterator(
        Numbers(failure), 3, shuffle=False, n_processes=2, shared_mem=9, **options
    )
    found = [next_of(iterator) for _ in range(3)]
    iterator.reset()
    found.append(next_of(iterator))
    iterator.finalize()
    return found

def written(kind, failure):
    writer = getattr(snapshot_writers, kind)(savefun=failure)
    for name in "ab":
        # The array is larger than a pipe's buffer.
        writer(name, ".", {"x": np.zeros(10**5)})
    try:
        writer.finalize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the outcomes of four iterators whose second batch fails, and of four failing writers.

    One program produces all of them.
    """
    body = FAILING + textwrap.dedent("""
        print({
            "exits": outcome(exits),
            "dies": outcome(dies),
            "dies with worker replacement": outcome(dies, maxtasksperchild=2),
            "raises": outcome(raises),
            "thread raises": written("ThreadQueueWriter", raises),
            "process raises": written("ProcessQueueWriter", raises),
            "process dies": written("ProcessQueueWriter", dies),
            "process exits": written("ProcessQueueWriter", lambda *args: sys.exit(0)),
        })
    """)
    results: dict[str, Any] = ast.literal_eval(
        run(tmp_path_factory.mktemp("failing"), "program.py", program=body).splitlines()[-1]
    )
    return results


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ("exits", "WorkerLostError: PoolWorker-"),
        ("dies", "ended with exit code -9 before the pool did"),
        ("dies with worker replacement", "ended with exit code -9 before the pool did"),
        ("raises", "LookupError: of example 4"),
    ],
)
def test_iterator_with_failed_worker_raises_on_every_later_call(
    failure: str, text: str, outcomes: dict[str, Any]
) -> None:
    first, *others = outcomes[failure]
    assert first == [0, 1, 2]
    for other in others:
        assert text in other


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ("thread raises", "the writer of the snapshots ended before all were written"),
        ("process raises", "ended with exit code 1 before all were written"),
        ("process dies", "ended with exit code -9 before all were written"),
        ("process exits", "the writer of the snapshots ended before all were written"),
    ],
)
def test_queue_writer_with_failed_worker_raises_worker_lost_error(
    failure: str, text: str, outcomes: dict[str, Any]
) -> None:
    assert outcomes[failure].startswith("WorkerLostError: ")
    assert text in outcomes[failure]


def test_custom_queue_writer_joins_queue_and_consumer_once() -> None:
    # Chainer's own test does the same: its queue and consumer have no tasks and no exit codes.
    class Writer(snapshot_writers.QueueWriter):  # type: ignore[misc, unused-ignore]
        def create_queue(self) -> Any:
            return mock.MagicMock()

        def create_consumer(self, queue: Any) -> Any:
            return mock.MagicMock()

    writer = Writer()
    writer("name", "folder", {})
    writer.finalize()
    assert writer._queue.put.call_count == 2
    assert writer._queue.join.call_count == 1
    assert writer._consumer.join.call_count == 1


def test_pool_map_while_all_workers_are_replaced_succeeds() -> None:
    with processes.Pool(2, maxtasksperchild=1) as pool, mock.patch.object(pool, "_pool", []):
        assert pool.map(abs, range(-20, 0)) == list(range(20, 0, -1))
        assert pool.map(abs, []) == []


def test_workers_that_cannot_start_are_not_restarted_endlessly(tmp_path: Path) -> None:
    body = FAILING + textwrap.dedent("""
        import multiprocessing

        if __name__ == "__main__":
            multiprocessing.set_start_method("spawn")
            print(outcome(Unreadable())[-1])
    """)
    written = run(tmp_path, "program.py", program=body)
    assert "WorkerLostError" in written
    assert "LookupError: not here" in written
    assert 1 <= len((tmp_path / "tried").read_text()) <= 2
