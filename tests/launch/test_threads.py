"""``collective run --backend threads``: the ranks are threads of one process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.launches import DEADLINE_S, finish, launches  # noqa: F401

BODY = "import collective\nimport numpy as np\ncomm = collective.init()\n"


@pytest.fixture
def run(launches):  # noqa: F811
    """Return a function that runs a program with ranks that are threads."""

    def start(body: str, size: int = 2, *arguments: str):
        path = launches.directory / "program.py"
        path.write_text(body)
        return launches.run("-n", str(size), "--backend", "threads", str(path), *arguments)

    yield start
    assert launches.living() == []
    assert launches.run_directories() == []


def test_thread_ranks_run_program_as_main_in_own_namespace(run):
    done = run(
        BODY + "mine = comm.rank\ncomm.barrier()\n"
        "print(__name__, mine, comm.size, collective.rank(), comm.backend)\n"
        "assert comm.all_reduce(np.ones(2))[0] == comm.size\n",
        3,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] __main__ {rank} 3 {rank} threads" for rank in range(3)
    ]
    assert done.stderr == ""


def test_thread_ranks_pickle_classes_and_functions_of_the_program(run):
    done = run(
        "from __future__ import annotations\nimport __main__, copy, dataclasses, enum, typing\n"
        + BODY
        + "class Color(enum.Enum):\n    RED = 1\n"
        "@dataclasses.dataclass\n"
        "class Point:\n    x: int\n    of: typing.ClassVar[int] = 5\n"
        "def double(x):\n    return 2 * x + comm.rank\n"
        "objects = [Color.RED, Point(comm.rank), double, Point]\n"
        "colors, points, functions, classes = zip(*comm.all_gather_object(objects, pickle=True))\n"
        "assert set(colors) == {Color.RED}, colors\n"
        "assert points == (Point(0), Point(1)) and set(classes) == {Point}, points\n"
        "assert set(functions) == {double} and __main__.double is double\n"
        "assert copy.deepcopy(objects) == objects\n",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("chosen", [{}, {"OMP_NUM_THREADS": "3"}], ids=["default", "chosen"])
def test_thread_run_sets_omp_num_threads_before_start(launches, chosen):  # noqa: F811
    share = chosen.get("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // 2))
    path = launches.directory / "program.py"
    # /proc/self/environ shows the environment at the start, which later assignments do not change.
    path.write_text(
        f"print('OMP_NUM_THREADS={share}' in open('/proc/self/environ').read().split('\\0'))"
    )
    done = launches.run("-n", "2", "--backend", "threads", str(path), **chosen)
    assert sorted(done.stdout.splitlines()) == ["[0] True", "[1] True"], done.stderr


def test_thread_run_prefixes_lines_of_both_streams(run):
    done = run(
        BODY + "import sys\n"
        "print('a', end=''); comm.barrier(); print('b')\n"
        "sys.stderr.write('to\\nstderr\\n')\n"
        "sys.stdout.writelines(['one\\n', 'two\\n'])\n"
        "print('never ended', end='')\n"
    )
    for rank in range(2):
        lines = [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == ["ab", "one", "two", "never ended"]
        lines = [line[4:] for line in done.stderr.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == ["to", "stderr"]


def test_thread_run_sets_argv_and_script_folder(run, launches):  # noqa: F811
    (launches.directory / "beside.py").write_text("value = 5\n")
    done = run("import sys, beside\nprint(sys.argv[1:], beside.value)\n", 1, "--flag", "x")
    assert done.stdout == "[0] ['--flag', 'x'] 5\n"


def test_thread_run_compiles_script_without_future_imports(run):
    done = run("def f(x: int): pass\nprint(f.__annotations__['x'] is int)\n", 1)
    assert done.stdout == "[0] True\n"


def test_thread_run_starts_modules_and_packages(launches):  # noqa: F811
    package = launches.directory / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sibling.py").write_text("value = 7\n")
    (package / "__main__.py").write_text("from .sibling import value\nprint(value)\n")
    done = launches.run("-n", "2", "--backend", "threads", "-m", "some_package")
    assert sorted(done.stdout.splitlines()) == ["[0] 7", "[1] 7"], done.stderr
    for name in ("no_such_module", "no_such_package.module"):
        done = launches.run("-n", "2", "--backend", "threads", "-m", name)
        assert done.returncode != 0
        assert done.stderr == f"collective run: no module named {name!r}\n"


def test_thread_failure_ends_with_traceback_and_exit_code(run):
    done = run(
        BODY + "def deeper():\n    raise ValueError('of rank one')\n"
        "comm.barrier()\n"
        "if comm.rank == 1:\n    deeper()\n"
        "comm.barrier()\n"
    )
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("collective run: rank 1 failed first (exit code 1)") :]
    assert report.endswith("ValueError: of rank one\n")
    assert "in deeper" in report
    assert "launch/threads" not in report, "the traceback shows frames of the launcher"


def test_thread_failure_reaches_peers_with_traceback(run):
    done = run(
        BODY + "import os, time\npart = comm.dup()\n"
        "if comm.rank == 1:\n"
        "    while not os.path.exists('through'):\n        time.sleep(0.01)\n"
        "    raise ValueError('of rank one')\n"
        "open('through', 'x').close()\n"
        "for it in (comm, part):\n"
        "    try:\n        it.barrier()\n"
        "    except collective.PeerFailedError as error:\n"
        "        print(error.rank, error.traceback.splitlines()[-1])\n"
    )
    assert done.stdout.splitlines() == ["[0] 1 ValueError: of rank one"] * 2


def test_thread_rank_exit_raises_peer_lost_in_all_communicators(run):
    done = run(
        BODY + "other = collective.init()\npart = comm.dup()\ncomm.barrier()\n"
        "if comm.rank == 0:\n"
        "    for it in (part, other, comm):\n"
        "        try:\n            it.barrier()\n"
        "        except collective.PeerLostError as error:\n"
        "            print(error.ranks)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0] (1,)"] * 3


@pytest.mark.parametrize(
    ("leave", "code", "text"),
    [("3", 3, ""), ("'a reason'", 1, "a reason"), ("0", 0, ""), ("", 0, ""), ("None", 0, "")],
)
def test_sys_exit_of_thread_rank_sets_exit_code(run, leave, code, text):
    done = run(
        BODY + "import sys\ntry:\n    comm.barrier()\n"
        f"    if comm.rank == 1:\n        sys.exit({leave})\n"
        "    comm.barrier()\n"
        "except collective.CommunicatorAbortedError:\n"
        f"    sys.exit(9 if {code} else 0)\n"
    )
    assert text in done.stderr
    assert ("rank 1 failed first" in done.stderr) == (code != 0)
    assert done.returncode == code, done.stderr


def test_sys_exit_of_thread_rank_outranks_errors_of_others(run):
    done = run(
        BODY + "import sys\ncomm.barrier()\nif comm.rank == 1:\n    sys.exit(3)\ncomm.barrier()\n"
    )
    assert done.returncode == 3
    assert "collective run: rank 1 failed first (exit code 3)." in done.stderr


def test_thread_failure_is_reported_while_another_rank_hangs(run):
    done = run(  # Its deadline is much shorter than the sleep of the other rank.
        BODY + "import time\ncomm.barrier()\n"
        "if comm.rank == 0:\n    raise ValueError('first')\n"
        "time.sleep(600)\n"
    )
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: first\n")


def _await(path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.01)


@pytest.mark.parametrize("waits", ["comm.barrier()", "time.sleep(600)", "comm.recv(None, 1)"])
def test_ctrl_c_ends_thread_run_without_traceback(launches, waits):  # noqa: F811
    path = launches.directory / "program.py"
    path.write_text(
        BODY + "import time\nif comm.rank == 0:\n    open('here', 'w').close()\n"
        f"    {waits}\nelse:\n    time.sleep(600)\n"
    )
    process = launches.start("-n", "2", "--backend", "threads", str(path))
    _await(launches.directory / "here")
    os.kill(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert launches.living() == []


def test_init_with_another_transport_in_thread_run_names_remedy(run):
    done = run("import collective\ncollective.init('shm')\n")
    assert done.returncode == 1
    assert "collective run --backend shm" in done.stderr


def test_init_with_device_list_naming_threads_works(run):
    done = run("import collective\nprint(collective.init('cpu:threads,cuda:nccl').backend)\n")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] nccl", "[1] nccl"]
