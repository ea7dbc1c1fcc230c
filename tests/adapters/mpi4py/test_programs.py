"""Programs of mpi4py without MPI. What calls do is proved by mpi4py's own tests: tests/mpi4py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.interpreter import printed, run_python
from tests.support.launches import Launches, launches
from tests.support.network_hosts import Hosts, needs_hosts

__all__ = ["launches"]


def _ranks(launches: Launches, body: str, *options: str, size: int = 2) -> str:
    """Run a program of mpi4py on ranks; return what they print, or fail with it."""
    program = launches.script(f"from mpi4py import MPI\ncomm = MPI.COMM_WORLD\n{body}")
    done = launches.run("-n", str(size), "--backend", "shm", "--mpi4py", *options, program)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_program_runs_on_ranks_of_this_library(launches: Launches) -> None:
    printed_by_ranks = _ranks(launches, "print(MPI.get_vendor()[0], comm.allreduce(comm.rank + 1))")
    assert sorted(printed_by_ranks.splitlines()) == ["[0] collective 3", "[1] collective 3"]


def test_children_and_metadata_are_those_of_this_module(launches: Launches) -> None:
    body = """
import importlib.metadata, subprocess, sys
code = "import importlib.util as u, importlib.metadata as m; print(u.find_spec('mpi4py').origin)"
origin = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
print("importable" in origin, importlib.metadata.version("mpi4py"))
"""
    lines = sorted(_ranks(launches, body).splitlines())
    assert lines == ["[0] True 4.1.2", "[1] True 4.1.2"]


def test_process_without_launcher_is_the_world() -> None:
    code = (
        "from collective.adapters import mpi4py; mpi4py.enable();"
        "from mpi4py import MPI; print(MPI.COMM_WORLD.size, MPI.COMM_WORLD.allgather('a'))"
    )
    assert printed("-c", code) == "1 ['a']\n"


def test_mpi4py_imported_before_is_refused_by_name(tmp_path: Path) -> None:
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mpi4py as real;"
        "from collective.adapters import mpi4py; mpi4py.enable()"
    )
    done = run_python("-c", code)
    assert f"{package / '__init__.py'} is imported already" in done.stderr


@pytest.mark.parametrize(
    ("call", "feature"),
    [
        ("MPI.File.Open(comm, 'x')", "File.Open"),
        ("MPI.Win.Create(bytearray(8))", "Win.Create"),
        ("comm.Spawn('x')", "Intracomm.Spawn"),
        ("comm.Create_intercomm(0, comm, 1)", "Intracomm.Create_intercomm"),
        ("MPI.Session.Init()", "Session.Init"),
        ("comm.Psend_init(bytearray(8), 2, 0)", "a partitioned message"),
    ],
)
def test_missing_part_is_refused_by_name_reason_and_alternative(call: str, feature: str) -> None:
    code = f"""
import json
from collective.adapters import mpi4py; mpi4py.enable()
from mpi4py import MPI
comm = MPI.COMM_WORLD
try:
    {call}
except NotImplementedError as error:
    print(json.dumps(str(error)))
"""
    text = json.loads(printed("-c", code))
    assert text.startswith(f"{feature}: collective.adapters.mpi4py does not have it: ")
    assert text.partition(". ")[2], "the text names no alternative"


def test_receive_from_lost_rank_raises_error_of_mpi(launches: Launches) -> None:
    body = """
import os
if comm.rank == 1:
    os._exit(7)
try:
    comm.recv(source=1)
except MPI.Exception as error:
    print(error.Get_error_class() == MPI.ERR_PROC_FAILED, "rank 1" in str(error), flush=True)
"""
    program = launches.script(f"from mpi4py import MPI\ncomm = MPI.COMM_WORLD\n{body}")
    done = launches.run("-n", "2", "--backend", "shm", "--mpi4py", program)
    assert "[0] True True" in done.stdout, done.stdout + done.stderr


def test_receives_that_wait_for_each_other_are_named_without_a_deadline(launches: Launches) -> None:
    body = """
try:
    comm.recv(source=1 - comm.rank, tag=3)
except MPI.Exception as error:
    print(str(error).replace(chr(10), " "))
"""
    lines = _ranks(launches, body).splitlines()
    assert len(lines) == 2
    for line in lines:
        for rank in (0, 1):
            assert f"rank {rank}: recv(src={1 - rank}, tag=3) at " in line
        assert re.search(r"\.py:\d+ in <module>", line)


def test_synchronous_send_waits_for_its_receive(launches: Launches) -> None:
    body = """
if comm.rank == 0:
    request = comm.issend("x", 1)
    before = request.Test()
    comm.send("now", 1, tag=1)
    request.wait()
    print(before)
else:
    comm.recv(source=0, tag=1)
    comm.recv(source=0, tag=0)
"""
    assert _ranks(launches, body) == "[0] False\n"


def test_rank_completes_its_receives_while_it_waits_in_a_synchronous_send(
    launches: Launches,
) -> None:
    body = """
other = 1 - comm.rank
request = comm.irecv(source=other)
comm.ssend(comm.rank, other)
print(request.wait())
"""
    assert sorted(_ranks(launches, body).splitlines()) == ["[0] 1", "[1] 0"]


@pytest.mark.parametrize(
    "call", ["Sendrecv(x, 1, 0, y)", "Sendrecv([x, 'd'], 1, 0, y)", "Isendrecv(x, 1, 0, y).Wait()"]
)
def test_sendrecv_answers_a_synchronous_send_before_its_own_send_is_taken(
    launches: Launches, call: str
) -> None:
    body = f"""
import numpy as np
x, y = np.zeros(2**20), np.zeros(1)
if comm.rank == 0:
    comm.{call}
    print(y)
else:
    comm.Ssend(np.ones(1), 0)
    comm.Recv(x, 0)
"""
    assert _ranks(launches, body, "--backend", "tcp") == "[0] [1.]\n"


def test_count_beyond_the_buffer_is_an_error_and_no_overrun() -> None:
    code = """
from collective.adapters import mpi4py; mpi4py.enable()
from mpi4py import MPI
try:
    MPI.COMM_SELF.Isend([bytearray(8), 3, MPI.INT], 0)
except ValueError as error:
    print(error)
"""
    assert "3 elements of MPI_INT are 12 bytes, but the buffer has 8" in printed("-c", code)


def test_ranks_that_are_threads_are_refused(launches: Launches) -> None:
    done = launches.run("-n", "2", "--backend", "threads", "--mpi4py", launches.script("pass"))
    assert (done.returncode, "one COMM_WORLD in a process" in done.stderr) == (2, True)


def test_transport_that_needs_mpi4py_itself_is_refused(launches: Launches) -> None:
    done = launches.run("-n", "2", "--backend", "mpi", "--mpi4py", launches.script("pass"))
    assert (done.returncode, "--mpi4py with mpi" in done.stderr) == (2, True)


def test_executor_runs_functions_on_other_ranks(launches: Launches) -> None:
    body = """
from mpi4py.futures import MPICommExecutor
with MPICommExecutor(comm) as executor:
    if executor is not None:
        print(list(executor.map(abs, [-1, -2, 3])))
"""
    assert _ranks(launches, body) == "[0] [1, 2, 3]\n"


def test_messages_of_freed_communicator_complete(launches: Launches) -> None:
    body = """
import time
import numpy as np
sub = comm.Dup()
if comm.rank == 1:
    requests = [sub.Isend(np.full(2**17, 7.0), 0), sub.isend("x", 0), sub.issend("y", 0)]
    requests[0].Free()
    sub.Free()
    requests[2].wait()
else:
    array = np.zeros(2**17)
    requests = [sub.Irecv(array), sub.irecv(), sub.irecv()]
    sub.Free()
    time.sleep(0.1)
    print(MPI.Request.waitall(requests)[1:], array.sum() / 2**17)
"""
    assert _ranks(launches, body) == "[0] ['x', 'y'] 7.0\n"


def test_free_ends_no_receive_from_another_rank(launches: Launches) -> None:
    body = """
import time
sub = comm.Dup()
if comm.rank == 0:
    print(sub.recv())
elif comm.rank == 2:
    time.sleep(0.2)  # until rank 1 has freed its handle, and perhaps ended
    sub.send("from 2", 0)
sub.Free()
"""
    assert _ranks(launches, body, size=3) == "[0] from 2\n"


def test_program_of_futures_has_all_other_ranks_as_workers(launches: Launches) -> None:
    program = launches.script("""
        from mpi4py.futures import MPICommExecutor, get_comm_workers

        def places(shift):
            comm = get_comm_workers()
            return comm.allgather(comm.rank + shift)

        if __name__ == "__main__":
            with MPICommExecutor() as executor:
                print(list(executor.map(places, [1, 1])))
        """)
    options = ["-n", "3", "--backend", "shm", "--mpi4py", "-m", "mpi4py.futures"]
    done = launches.run(*options, program)
    assert done.stdout == "[0] [[1, 2], [1, 2]]\n", done.stdout + done.stderr


def test_ranks_exclude_each_other_and_wait_for_conditions(launches: Launches) -> None:
    body = """
from mpi4py.util.sync import Condition, Counter, Mutex, Semaphore
counter, mutex, places = Counter(comm=comm), Mutex(comm=comm), Semaphore(2, comm=comm)
with mutex:
    numbers = [next(counter), next(counter)]
with places:
    pass
filled = Condition(comm=comm)
if comm.rank == 0:
    woken = 0
    while woken < comm.size - 1:
        with filled:
            woken += filled.notify_all()
else:
    with filled:
        filled.wait()
for each in (counter, mutex, places, filled):
    each.free()
print(numbers[1] - numbers[0], sorted(comm.allreduce(numbers)))
"""
    lines = _ranks(launches, body, size=3).splitlines()
    assert sorted(lines) == [f"[{rank}] 1 [0, 1, 2, 3, 4, 5]" for rank in range(3)]


@pytest.mark.parametrize("backend", ["shm", "hierarchical"])
def test_ranks_of_host_share_memory_of_window(launches: Launches, backend: str) -> None:
    body = """
import numpy as np
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
window = MPI.Win.Allocate_shared(80 if node.rank == 0 else 8, 8, comm=node)
numbers = np.frombuffer(window.Shared_query(0)[0])
np.frombuffer(window.tomemory())[0] = numbers[1 + node.rank] = node.rank
window.Fence()
print(numbers[1:3], np.frombuffer(window.Shared_query(1)[0]), window.Shared_query(0)[1])
window.Free()
"""
    lines = _ranks(launches, body, "--backend", backend).splitlines()
    assert sorted(lines) == [f"[{rank}] [0. 1.] [1.] 8" for rank in range(2)]


def test_window_over_transport_without_shared_memory_is_refused(launches: Launches) -> None:
    body = """
try:
    MPI.Win.Allocate_shared(8, comm=comm)
except NotImplementedError as error:
    print("--backend shm" in str(error))
"""
    lines = _ranks(launches, body, "--backend", "tcp").splitlines()
    assert sorted(lines) == ["[0] True", "[1] True"]


def test_array_of_foreign_byte_order_is_refused() -> None:
    code = """
import numpy as np
from collective.adapters import mpi4py; mpi4py.enable()
from mpi4py import MPI
try:
    MPI.COMM_SELF.Send(np.ones(2, ">i4"), 0)
except BufferError as error:
    print(error)
"""
    assert "non-native byte order" in printed("-c", code)


def test_several_edges_from_a_rank_to_itself_carry_an_object_each(launches: Launches) -> None:
    body = """
ring = comm.Create_dist_graph_adjacent([comm.rank] * 2, [comm.rank] * 2)
print(ring.neighbor_alltoall(["first", "second"]))
print(MPI.COMM_SELF.Create_cart([1], [True]).neighbor_alltoall(["down", "up"]))
"""
    lines = _ranks(launches, body, size=1).splitlines()
    assert lines == ["[0] ['first', 'second']", "[0] ['up', 'down']"]


def test_status_counts_elements_of_nested_datatypes() -> None:
    code = """
from collective.adapters import mpi4py; mpi4py.enable()
from mpi4py import MPI
pair = MPI.Datatype.Create_struct([2, 1], [4, 0], [MPI.SHORT, MPI.INT])
three, status = pair.Create_vector(3, 1, 2), MPI.Status()
for nbytes in (24, 8, 6, 5):
    status.count = nbytes
    elements = status.Get_elements(three)
    print(None if elements == MPI.UNDEFINED else elements)
"""
    # Each pair travels as two shorts and an int.
    assert printed("-c", code) == "9\n3\nNone\nNone\n"


@pytest.mark.parametrize(
    "call",
    ["Scan(x, y, MPI.BAND)", "Reduce(x, y, MPI.BAND)", "Iallreduce(z, z, MPI.MAX)"],
)
def test_operator_without_meaning_for_a_datatype_is_an_error_on_each_rank(
    launches: Launches, call: str
) -> None:
    body = f"""
import numpy as np
x, y, z = np.ones(2), np.ones(2), np.ones(2, complex)
try:
    comm.{call}
except MPI.Exception as error:
    print(error.Get_error_class() == MPI.ERR_OP, "is not defined for" in str(error))
"""
    assert sorted(_ranks(launches, body).splitlines()) == ["[0] True True", "[1] True True"]


def test_name_in_place_of_an_operator_is_a_type_error() -> None:
    code = """
import numpy as np
from collective.adapters import mpi4py; mpi4py.enable()
from mpi4py import MPI
try:
    MPI.COMM_SELF.Allreduce(np.ones(2), np.ones(2), "sum")
except TypeError as error:
    print(error)
"""
    assert printed("-c", code) == "op: expected Op, got str 'sum'\n"


def test_reduction_of_inputs_of_different_lengths_is_an_error(launches: Launches) -> None:
    body = """
import numpy as np
x = np.ones(2 - comm.rank)
try:
    comm.Iallreduce(x, x.copy()).Wait()
except MPI.Exception as error:
    print(str(error))
"""
    lines = sorted(_ranks(launches, body).splitlines())
    assert lines[0].startswith("[0] reduction: rank 1 gave 8 bytes, and rank 0 gave 16. ")
    assert lines[1].startswith("[1] MPI_ERR_TRUNCATE")


@pytest.mark.parametrize(
    ("part", "message"),
    [("[2], [-1]", "begin 4 bytes before the buffer"), ("[-1], [1]", "negative count -1")],
)
def test_part_outside_of_the_buffer_is_an_error(part: str, message: str) -> None:
    code = f"""
from array import array
from collective.adapters import mpi4py; mpi4py.enable()
from mpi4py import MPI
try:
    MPI.COMM_SELF.Alltoallv([array("i", range(4)), {part}, MPI.INT], array("i", range(4)))
except (MPI.Exception, ValueError) as error:
    print(error)
"""
    assert message in printed("-c", code)


@pytest.mark.parametrize("call", ["Waitall", "waitall", "Testall", "Waitsome"])
def test_error_of_one_of_several_requests_is_in_its_status(launches: Launches, call: str) -> None:
    body = f"""
import numpy as np
other, statuses = 1 - comm.rank, [MPI.Status(), MPI.Status()]
whole, short = np.zeros(2), np.zeros(1)
requests = [comm.Irecv(whole, other, 1), comm.Irecv(short, other, 2)]
for tag in (1, 2):
    comm.Send(np.ones(2), other, tag)
comm.Barrier()
try:
    while MPI.Request.{call}(requests, statuses) is False:
        pass
except MPI.Exception as error:
    print(error.Get_error_class() == MPI.ERR_IN_STATUS, "The first one: MPI_ERR_TR" in str(error))
print(*[status.error == MPI.ERR_TRUNCATE for status in statuses], *map(bool, requests))
"""
    lines = ["[0] False True False False", "[0] True True"]
    lines += [line.replace("[0]", "[1]") for line in lines]
    assert sorted(_ranks(launches, body).splitlines()) == lines


def test_wait_for_several_requests_names_the_lost_rank(launches: Launches) -> None:
    body = """
import os
if comm.rank == 1:
    os._exit(7)
try:
    MPI.Request.waitall([comm.irecv(source=1)])
except MPI.Exception as error:
    print(error.Get_error_class() == MPI.ERR_PROC_FAILED, "rank 1" in str(error), flush=True)
"""
    program = launches.script(f"from mpi4py import MPI\ncomm = MPI.COMM_WORLD\n{body}")
    done = launches.run("-n", "2", "--backend", "shm", "--mpi4py", program)
    assert "[0] True True" in done.stdout, done.stdout + done.stderr


def test_rank_outside_of_a_new_communicator_gets_a_null_handle_of_its_class() -> None:
    code = """
from collective.adapters import mpi4py; mpi4py.enable()
from mpi4py import MPI
comm = MPI.COMM_WORLD
empty = MPI.GROUP_EMPTY
for null in (comm.Split(MPI.UNDEFINED), comm.Create(empty), comm.Create_group(empty),
             comm.Create_cart([0])):
    print(type(null).__name__, null == MPI.COMM_NULL, bool(null))
"""
    assert printed("-c", code) == "Intracomm True False\n" * 3 + "Cartcomm True False\n"


def test_executors_are_of_the_kinds_that_their_names_say(launches: Launches) -> None:
    program = launches.script(
        """
import os
from mpi4py import MPI, futures

if __name__ == "__main__":
    for kind in (futures.MPIPoolExecutor, futures.ProcessPoolExecutor, futures.ThreadPoolExecutor):
        with kind(max_workers=1) as executor:
            rank = executor.submit(MPI.COMM_WORLD.Get_rank).result()
            here = executor.submit(os.getpid).result() == os.getpid()
            # Programs look for _max_workers in executors, and for a number of _processes in pools.
            print(rank, here, executor._max_workers, hasattr(executor, "_processes"))
"""
    )
    done = launches.run(
        "-n", "3", "--backend", "shm", "--mpi4py", "-m", "mpi4py.futures", program
    )  # fmt: skip
    lines = ["[0] 2 False 2 False", "[0] 0 False 1 False", "[0] 0 True 1 False"]
    assert done.stdout.splitlines() == lines, done.stdout + done.stderr


def test_methods_pickle_by_the_names_of_their_class() -> None:
    code = """
import pickle
from collective.adapters import mpi4py; mpi4py.enable()
from mpi4py import MPI

def resolves(owner, name):
    method = getattr(owner, name)
    return pickle.loads(pickle.dumps(method)).__name__ == method.__name__

comm = MPI.COMM_WORLD
names = [name for name in dir(comm) if name[0] != "_" and callable(getattr(comm, name))]
print(len(names) > 150, [name for name in names if not resolves(comm, name)])
print(resolves(MPI.Request, "Waitall"), resolves(MPI.Status(), "Get_tag"))
print(pickle.loads(pickle.dumps(comm.Get_size))())
"""
    assert printed("-c", code) == "True []\nTrue True\n1\n"


def test_ranks_of_a_host_are_those_that_share_memory(tmp_path: Path) -> None:
    needs_hosts()
    program = tmp_path / "program.py"
    program.write_text(
        """
from mpi4py import MPI
host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
window = MPI.Win.Allocate_shared(8, 8, comm=host)
memory, _ = window.Shared_query(0)
if host.rank == 0:
    memory[0] = 40 + MPI.COMM_WORLD.rank
window.Fence()
print(host.size, memory[0])
"""
    )
    with Hosts(2, tmp_path) as hosts:
        job = hosts.run(["--hosts", "host0:2,host1:2", "--mpi4py", str(program)])
        lines = sorted(job.succeed().splitlines())
    assert lines == ["[0] 2 40", "[1] 2 40", "[2] 2 42", "[3] 2 42"]
