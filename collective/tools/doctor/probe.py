"""Questions about libraries, answered in separate processes.

A library may crash, hang or print when it is loaded, and MPI may be initialised only once in a
process. None of that affects the process that asks, and every process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from collective import CollectiveError, CollectiveTimeoutError
from collective.inner import Deadline, load, registry
from collective.launch.mpiexec import mpi_segments, remove_segments
from collective.start.choice import options

from . import gpus

# Variables that launchers set for their processes. A process that answers questions is not a rank
# of the job that the doctor may run in, and its MPI must not contact that job's daemons. Settings
# of the MPI libraries (FI_, I_MPI_, MPIR_CVAR_, OMPI_MCA_, UCX_) stay.
_LAUNCHER = re.compile(
    r"(LOCAL_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|(GROUP|ROLE)_RANK|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_.*|SLURM_.*|PMI_.*|PMI2_.*|PMIX_(?!MCA_).*|PALS_.*"
    r"|OMPI_(COMM_WORLD_|UNIVERSE|APP_CTX|FIRST|FILE|MCA_ess|MCA_orte|MCA_pmix).*|PRTE_(?!MCA_).*"
    r"|HYD.*|MPI_LOCAL.*|I_MPI_HYDRA_.*"
)
# Settings of this package that belong to a transport and not to a job.
_OF_TRANSPORTS = {
    "COLLECTIVE_ACROSS",
    "COLLECTIVE_CUDA_LIBRARY",
    "COLLECTIVE_DISABLE",
    "COLLECTIVE_INTERFACE",
    "COLLECTIVE_NCCL_LIBRARY",
}
# Directories in which a process of Open MPI that no mpiexec started would leave files behind.
_LEFT_BEHIND = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
# Seconds that a process may take to leave after SIGTERM.
_LEAVE_S = 0.5
# Seconds between two checks whether the caller still waits for an answer.
_LOOK_S = 0.1
_START_S = 6.0  # MPI usually starts in a fraction of a second
# Package -> module that makes the package importable.
_THROUGH = {"chainer": "collective.adapters.chainer"}
_SHOWN = 400  # number of characters that are shown of a library's output


class Answer(NamedTuple):
    """Answer of a process, or the reason why there is none.

    Attributes:
        facts: facts by name; empty if there is an error.
        error: error text for people; empty if there is no error.
        late: whether the time ended before there was an answer.
        timed_out: whether the answer is that a step took too long, which may be the machine's load.
    """

    facts: dict[str, Any]
    error: str = ""
    late: bool = False
    timed_out: bool = False


def ask(
    questions: Sequence[str], seconds: float, leaving: threading.Event | None = None
) -> dict[str, Answer]:
    """Answer ``questions`` in a separate process, one after the other.

    If a question ends the process, a new process answers the remaining questions.

    Args:
        questions: topics, some with a name: ``"import torch"``, ``"connect shm"``,
            ``"trial shm"`` or ``"trial mpi MPIEXEC"``, ``"mpi"``, ``"nccl"``, ``"gpus"``,
            ``"single-copy"``.
        seconds: time limit, after which a running process is ended.
        leaving: event that ends a running process, too, once it is set.

    Returns:
        An answer for each question.
    """
    deadline = Deadline(seconds)
    leaving = leaving or threading.Event()
    answers: dict[str, Answer] = {}
    while open_ := [question for question in questions if question not in answers]:
        if leaving.is_set() or deadline.expired:
            answers |= dict.fromkeys(open_, Answer({}, f"not tried within {seconds:g} s", True))
            break
        try:
            scratch = tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True)
        except OSError as error:
            answers |= dict.fromkeys(open_, Answer({}, f"no temporary directory: {error}"))
            break
        with scratch as directory:
            answers |= _ask(open_, deadline, directory, leaving)
    return answers


def _ask(
    questions: Sequence[str], deadline: Deadline, scratch: str, leaving: threading.Event
) -> dict[str, Answer]:
    """Answer as many of ``questions`` as one process can; at least the first is answered."""
    process = subprocess.Popen(
        _command(*questions, str(deadline.left())),
        env=environment(TMPDIR=scratch, **dict.fromkeys(_LEFT_BEHIND, scratch)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        streams = _hear(process, deadline, leaving)
        late = streams is None
        if streams is None:
            _end(process)
            try:
                streams = process.communicate(timeout=_LEAVE_S)
            except subprocess.TimeoutExpired as expired:  # a process out of reach holds the pipe
                streams = expired.stdout or b"", expired.stderr or b""
    finally:
        _end(process)
    output, noise = streams
    lines = [json.loads(line) for line in output.splitlines(keepends=True) if line[-1:] == b"\n"]
    answers = {
        question: Answer(facts, error, False, slow) for question, facts, error, slow in lines
    }
    for question in questions:
        if question not in answers:
            if late:
                answers[question] = Answer({}, f"no answer within {deadline.seconds:g} s", True)
            else:
                answers[question] = Answer({}, _how_it_ended(process.returncode, noise))
            break
    return answers


def _command(*arguments: str) -> list[str]:
    """Return the command of a process that calls :func:`main` and has this process's sys.path."""
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {__name__} import main; main(*sys.argv[2:])"
    )
    return [sys.executable, "-c", code, path, *arguments]


def _hear(
    process: subprocess.Popen[bytes], deadline: Deadline, leaving: threading.Event
) -> tuple[bytes, bytes] | None:
    """Return the output of a process, or None if it does not end in time or ``leaving`` is set."""
    while not (leaving.is_set() or deadline.expired):
        # communicate() keeps the output that it has read before a timeout.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=deadline.at_most(_LOOK_S))
    return None


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without variables of launchers and of jobs."""
    variables: Mapping[str, str] = {
        name: value
        for name, value in os.environ.items()
        if name in _OF_TRANSPORTS
        or not (_LAUNCHER.fullmatch(name) or name.startswith("COLLECTIVE_"))
    }
    return {**variables, **changes}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children; first give them time to clean up."""
    segments = mpi_segments(process.pid) if process.returncode is None else set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
            if process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LEAVE_S)
    remove_segments(segments)


def _how_it_ended(code: int, noise: bytes) -> str:
    lines = [line.strip() for line in noise.decode(errors="replace").splitlines()]
    words = " ".join(line for line in lines if line)
    if len(words) > _SHOWN:
        words = f"… {words[-_SHOWN:]}"
    try:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    except ValueError:
        how = f"was killed by signal {-code}"
    return f"the process that tried it {how}" + (f": {words}" if words else "")


# -- in the process that answers ------------------------------------------------------------


def main(*arguments: str) -> None:
    """Print answers to questions, a line each; the last argument is the time limit in seconds."""
    *questions, seconds = arguments
    # If the parent cannot end this process, the alarm does so wherever the process hangs.
    signal.alarm(math.ceil(float(seconds)) + 1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    with contextlib.suppress(CollectiveError):
        load({}).name_libraries()
    for question in questions:
        topic, _, name = question.partition(" ")
        try:
            answer = (question, _TOPICS[topic](name), "", False)
        except CollectiveError as error:
            answer = (question, {}, str(error), isinstance(error, CollectiveTimeoutError))
        except BaseException as error:  # a library may even call sys.exit
            answer = (question, {}, f"{type(error).__name__}: {error}", False)
        print(json.dumps(answer), file=answers)


def _import(name: str) -> dict[str, Any]:
    # Chainer's last release does not import by itself; programs that use it with this package
    # import it by way of the adapter.
    through = _THROUGH.get(name, "")
    if through:
        importlib.import_module(through)
    module = importlib.import_module(name)
    facts = {"version": str(getattr(module, "__version__", "")), "through": through}
    if name == "torch":
        facts["cuda"] = module.version.cuda or ""
        if module.distributed.is_available():
            plugin = importlib.import_module("collective.adapters.torch.backend")
            facts["through"] = f"torch.distributed.{plugin.way()}"
    return facts


def _connect(name: str) -> dict[str, Any]:
    """Connect a world of one rank, so that the library loads, starts, and opens its resources."""
    from collective.testing.ranks import Opening

    kind = registry.find(name)
    if name == "nccl":  # connect() does not use NCCL before there is an array on a GPU
        gpus.try_nccl()
    with tempfile.TemporaryDirectory() as meeting:
        opening = Opening(name, 1, f"doctor-{secrets.token_hex(8)}", meeting, 30.0)
        world = dataclasses.replace(opening.world(0), options=_options())
        kind.connect(world, Deadline(opening.timeout)).close()
    return {
        "devices": sorted(kind.capabilities.devices),
        "across_hosts": kind.capabilities.across_hosts,
        "in_process": kind.capabilities.in_process,
    }


def _options() -> dict[str, str]:
    """Return the settings for single transports; {} if a setting is wrong."""
    try:
        return options(load({}))
    except CollectiveError:
        return {}


def _trial(name: str) -> dict[str, Any]:
    # Imported here: the module imports the communicator and the launcher.
    from . import trial

    name, _, mpiexec = name.partition(" ")
    if mpiexec:  # its ranks share memory, which is slow on a disk, and mpiexec removes the files
        for variable in _LEFT_BEHIND:
            os.environ.pop(variable, None)
    return trial.run(name, mpiexec)


def _mpi(_: str) -> dict[str, Any]:
    """Describe the MPI library after starting it: before that, some libraries abort."""
    from collective.backends.mpi import library

    library.start(Deadline(_START_S))
    return dataclasses.asdict(library.describe())


def _single_copy(_: str) -> dict[str, Any]:
    """Let a forked child read the memory of this process, its parent, as a peer would."""
    import ctypes

    from collective.backends.shm.permission import Permission
    from collective.inner import platform

    word, copy = ctypes.c_int64(secrets.randbits(62)), ctypes.c_int64()
    me = os.getpid()
    permission = Permission([me])  # permits the children of this process, too
    child = os.fork()
    if child == 0:
        read = platform.read_process(me, ctypes.addressof(word), ctypes.addressof(copy), 8)
        os._exit(0 if read and copy.value == word.value else 1)
    works = os.waitpid(child, 0)[1] == 0
    permission.withdraw()
    return {"works": works}


_TOPICS: dict[str, Callable[[str], dict[str, Any]]] = {
    "connect": _connect,
    "gpus": lambda _: gpus.facts(),
    "import": _import,
    "mpi": _mpi,
    "nccl": lambda _: gpus.nccl_facts(),
    "single-copy": _single_copy,
    "trial": _trial,
}
