"""Names that users know from MPI, torch.distributed, Horovod and NCCL, and their names here.

Using such a name raises an ``AttributeError`` or ``TypeError``, as any unknown name does. Its text
shows the call to write instead. Correct calls never execute this code.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from collective.contract.work import Work
from collective.memory.holding import hold

_Function = TypeVar("_Function", bound=Callable[..., Any])

_BACKGROUND = "with async_op=True, which returns a Work; work.wait()"
_ARRAYS = "which takes structures of arrays, too"

#: Calls of a communicator or of the package, and the foreign names that they replace.
_CALLS: dict[str, tuple[str, ...]] = {
    "all_gather(x)": (
        "allgather", "Allgather", "Allgatherv", "Iallgather", "all_gather_into_tensor",
        "all_gather_single", "all_gather_v", "allgatherv", "grouped_allgather", "allGather",
    ),
    "all_gather(x, async_op=True)": ("Iallgatherv", "allgather_async"),
    "all_gather_object(obj)": ("allgather_object", "allgather_obj"),
    "all_reduce(x, op='sum')": (
        "Allreduce", "Iallreduce", "allreduce", "allreduce_", "allReduce", "psum",
        "grouped_allreduce",
    ),
    "all_reduce(x, op='avg')": ("pmean", "all_mean", "average"),
    "all_reduce(x, async_op=True)": (
        "allreduce_async", "allreduce_async_", "iallreduce", "grouped_allreduce_async",
    ),
    f"all_reduce([x, y]), {_ARRAYS}": (
        "all_reduce_coalesced", "all_reduce_multigpu", "allreduce_multigpu", "grouped_allreduce_",
    ),
    "all_to_all(x)": (
        "Alltoall", "Alltoallv", "alltoall", "all_to_all_single", "Ialltoall", "alltoallv",
        "Alltoallw",
    ),
    "all_to_all(x, async_op=True)": ("Ialltoallv", "Ialltoallw", "alltoall_async"),
    "barrier()": ("Barrier", "barrier_all", "monitored_barrier", "Ibarrier"),
    "broadcast(x, root=0)": ("Bcast", "Ibcast", "bcast", "broadcast_", "broadcast_multigpu"),
    "broadcast(x, async_op=True)": ("broadcast_async", "broadcast_async_"),
    f"broadcast(x, root=0, out=x), {_ARRAYS}": (
        "broadcast_parameters", "broadcast_optimizer_state", "broadcast_coalesced", "bcast_data",
    ),
    "broadcast_object(obj, root=0)": ("broadcast_object_list", "bcast_obj"),
    "gather(x, root=0)": ("Gather", "Gatherv", "gatherv", "Igather", "Igatherv"),
    "gather_object(obj, root=0)": ("gather_obj",),
    "reduce(x, root=0, op='sum')": ("Reduce", "Ireduce", "reduce_multigpu"),
    "reduce_scatter(x, op='sum')": (
        "Reduce_scatter", "Reduce_scatter_block", "reduce_scatter_tensor", "reducescatter",
        "reduce_scatter_v", "psum_scatter", "reduce_scatter_single", "reduceScatter",
        "Ireduce_scatter", "Ireduce_scatter_block", "reducescatter_async",
    ),
    "scan(x, op='sum')": ("Scan", "Iscan"),
    "scan(x, op='sum') - x, for sums": ("Exscan", "exscan", "Iexscan"),
    "scatter(x, root=0)": ("Scatter", "Scatterv", "scatterv", "Iscatter", "Iscatterv"),
    "scatter_object(objs, root=0)": ("scatter_object_list",),
    "send(x, dst, tag=0)": (
        "Send", "Ssend", "ssend", "Bsend", "bsend", "Rsend", "send_multigpu",
    ),
    "recv(out, src, tag=0)": ("Recv", "receive", "recv_multigpu"),
    "recv(None, src), which takes a message of any shape; a Status as status= holds its source": (
        "Probe", "probe", "Iprobe", "iprobe", "Mprobe", "mprobe", "Improbe", "improbe",
    ),
    f"send(x, dst, ...) {_BACKGROUND}": (
        "Isend", "isend", "Ibsend", "ibsend", "Issend", "issend", "Irsend",
    ),
    f"recv(out, src, ...) {_BACKGROUND}": ("Irecv", "irecv"),
    "sendrecv(x, dst, src)": (
        "Sendrecv", "Sendrecv_replace", "send_recv", "sendreceive", "ppermute",
        "batch_isend_irecv", "Isendrecv", "Isendrecv_replace",
    ),
    "send_object(obj, dst)": ("send_object_list", "send_obj"),
    "recv_object(src)": ("recv_object_list", "recv_obj"),
    "split(color, key)": (
        "Split", "new_group", "new_subgroups", "Create", "split_group",
        "new_subgroups_by_enumeration",
    ),
    "group(ranks)": ("Create_group", "Incl", "add_process_set", "create_collective_group"),
    "split('host')": ("Split_type", "COMM_TYPE_SHARED", "split_by_host"),
    "dup()": ("Dup", "Clone", "Idup", "Dup_with_info"),
    "grid(shape, periodic)": ("Create_cart", "Cart_create", "init_device_mesh"),
    "grid(shape).neighbours(axis)": ("Shift", "Cart_shift"),
    "grid(shape).along(axis)": ("Sub", "Cart_sub"),
    "grid(shape).coords": ("Get_coords", "Get_topo", "Cart_get"),
    "grid(shape).rank_at(coords)": ("Get_cart_rank",),
    "grid((None, None)).shape": ("Compute_dims", "Dims_create"),
    "shrink()": ("Shrink", "shrink_group", "Ishrink"),
}  # fmt: skip
#: Replacements that are the same for a communicator and for the package, and the foreign names.
_IN_WORDS: dict[str, tuple[str, ...]] = {
    "out=x, as in comm.all_reduce(x, out=x)": ("IN_PLACE",),
    "work.wait(), where work is what a call with async_op=True returns": (
        "Wait", "Waitany", "waitany", "synchronize", "wait_tensor",
    ),
    "[work.wait() for work in works], where works are what calls with async_op=True return": (
        "Waitall", "waitall", "Waitsome", "waitsome",
    ),
    "work.done(), where work is what a call with async_op=True returns": (
        "Test", "Testall", "Testany", "Testsome", "testall", "testany", "poll",
    ),
    "the call itself, as comm.all_reduce(x, out=y): a repeated call finds its plan again": (
        "Allreduce_init", "Allgather_init", "Alltoall_init", "Barrier_init", "Bcast_init",
        "Gather_init", "Reduce_init", "Scan_init", "Scatter_init", "Reduce_scatter_init", "plan",
    ),
    "a call on a list of arrays, which is sent as one": ("groupStart", "groupEnd"),
    "`with collective.init() as comm:`, which closes comm at its end": ("finalize",),
    "DistributedDataParallel.join() of collective.adapters.torch": ("join",),
    "DistributedDataParallel of collective.adapters.torch": ("DistributedOptimizer",),
    "create_multi_node_optimizer of collective.adapters.chainer": (
        "allreduce_grad", "multi_node_mean_grad", "create_multi_node_optimizer",
    ),
    "create_multi_node_evaluator of collective.adapters.chainer": ("create_multi_node_evaluator",),
    "scatter_dataset of collective.adapters.chainer": ("scatter_dataset",),
}  # fmt: skip
#: Replacements that differ for a communicator (first) and for the package (second).
_OF_BOTH: dict[str, tuple[str, str]] = {
    "Agree": ("comm.membership.agree(flag)", "collective.current().membership.agree(flag)"),
    "Iagree": ("comm.membership.agree(flag)", "collective.current().membership.agree(flag)"),
    "Abort": ("comm.abort(reason)", "collective.current().abort(reason)"),
    "allreduce_obj": (
        "comm.all_reduce(number), or comm.all_gather_object(obj)",
        "collective.all_reduce(number), or collective.all_gather_object(obj)",
    ),
    "destroy": ("comm.close()", "collective.current().close()"),
    "Disconnect": ("comm.close()", "collective.current().close()"),
    "Free": ("comm.close()", "collective.current().close()"),
    "free": ("comm.close()", "collective.current().close()"),
    "Get_rank": ("comm.rank", "collective.rank()"),
    "Get_size": ("comm.size", "collective.size()"),
    "Revoke": ("comm.abort(reason)", "collective.current().abort(reason)"),
    "get_collective_group_size": ("comm.size", "collective.size()"),
    "get_node_local_rank": ("comm.local_rank", "collective.current().local_rank"),
    "get_rank": ("comm.rank", "collective.rank()"),
    "get_size": ("comm.size", "collective.size()"),
    "get_world_size": ("comm.size", "collective.size()"),
    "inter_size": (
        "comm.split(comm.local_rank).size",
        "collective.split(collective.current().local_rank).size",
    ),
    "inter_rank": (
        "comm.split(comm.local_rank).rank",
        "collective.split(collective.current().local_rank).rank",
    ),
    "intra_rank": ("comm.local_rank", "collective.current().local_rank"),
    "intra_size": ("comm.local_size", "collective.current().local_size"),
    "rank_id": ("comm.rank", "collective.rank()"),
    "world_size": ("comm.size", "collective.size()"),
}
#: Replacements for names of the package only.
_OF_PACKAGE = {
    **dict.fromkeys(
        ("ANY_TAG", "MPI", "Win"),
        "`collective run --mpi4py`, which runs a program of mpi4py unmodified: this package has no "
        "messages of any tag and no windows",
    ),
    **dict.fromkeys(
        ("MAXLOC", "MINLOC", "maxloc", "minloc"), "max or min of all_gather_object((x, rank))"
    ),
    "COMM_WORLD": "collective.init(), which returns a communicator",
    "COMM_SELF": "comm.split(comm.rank)",
    "COMM_NULL": "None, which comm.split(None) returns",
    "Comm": "collective.Communicator",
    "Compression": "collective.compression.Cast",
    "Get_processor_name": "socket.gethostname()",
    "Intracomm": "collective.Communicator",
    "Is_finalized": "comm.closed",
    "Is_initialized": "collective.current(), which raises where there is none",
    "Init": "collective.init()",
    "Finalize": "comm.close(), or `with collective.init() as comm:`",
    "BAND": "op='band'",
    "BOR": "op='bor'",
    "BXOR": "op='bxor'",
    "LAND": "op='land'",
    "LOR": "op='lor'",
    "MAX": "op='max'",
    "MIN": "op='min'",
    "Max": "op='max'",
    "Min": "op='min'",
    "Op": "op=collective.user_op(function)",
    "PROD": "op='prod'",
    "Product": "op='prod'",
    "ProcessGroup": "collective.Communicator",
    "ProcessSet": "comm.group(ranks)",
    "PROC_NULL": "collective.NULL",
    "SUM": "op='sum'",
    "Sum": "op='sum'",
    "UNDEFINED": "None, as in comm.split(None)",
    "Wtime": "time.perf_counter()",
    "Average": "op='avg'",
    "Request": "collective.Work",
    "create_communicator": "collective.init(), which returns a communicator",
    "destroy_collective_group": "comm.close(), or `with collective.init() as comm:`",
    "destroy_process_group": "comm.close(), or `with collective.init() as comm:`",
    "get_backend": "collective.current().backend",
    "init_collective_group": "collective.init(rank=, size=, store=), which returns a communicator",
    "init_process_group": "collective.init(), which returns a communicator",
    "local_rank": "collective.current().local_rank",
    "local_size": "collective.current().local_size",
    "is_group_initialized": "collective.current(), which raises where there is none",
    "is_initialized": "collective.current(), which raises where there is none",
    "shutdown": "comm.close(), or `with collective.init() as comm:`",
}
for _holder, _names in {
    # Names that a communicator once had itself.
    "inner": (
        "adopt", "check", "enqueues", "expects", "fail", "foreign", "leave", "listen", "on_host",
        "succession", "transport",
    ),
    "membership": (
        "agree", "generation", "grows", "joins", "lost", "origin", "shrink_timeout", "waiting",
    ),
}.items():  # fmt: skip
    for _name in _names:
        _place = f"{_holder}.{_name}"
        _OF_BOTH[_name] = (f"comm.{_place}", f"collective.current().{_place}")
#: Names that mpi4py has in lower case for objects.
_OF_OBJECTS = {
    "allgather": "all_gather_object(obj)",
    "bcast": "broadcast_object(obj, root=0)",
    "irecv": "recv_object(src)",
    "isend": "send_object(obj, dst)",
    "ssend": "send_object(obj, dst)",
}
_CALL_OF = {name: call for call, names in _CALLS.items() for name in names}
_WORDS_OF = {name: words for words, names in _IN_WORDS.items() for name in names}
_OF_COMMUNICATOR = _CALL_OF.keys() | _WORDS_OF.keys() | _OF_BOTH.keys()

#: Foreign keywords, and their possible names here. The first name that the function has is used.
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "async_": ("async_op",), "average": ("op",), "blocking": ("async_op",),
    "buf": ("x", "out"), "colour": ("color",), "data": ("x", "obj"), "dest": ("dst", "root"),
    "destination": ("dst",), "dim": ("axis",), "dims": ("shape",), "displs": (), "dst": ("root",),
    "dst_rank": ("dst", "root"), "gather_list": ("out",),
    "group": ("ranks",), "group_dst": ("dst", "root"), "group_src": ("src", "root"),
    "input": ("x",), "input_list": ("x",), "input_split_sizes": ("counts",),
    "input_tensor": ("x",), "input_tensor_list": ("x",), "inputs": ("x",), "name": (),
    "obj": ("x",), "object_list": ("obj", "objs"),
    "operation": ("op",), "output": ("out",), "output_split_sizes": (),
    "output_tensor": ("out",), "output_tensor_list": ("out",), "periods": ("periodic",),
    "recvbuf": ("out",), "recvcounts": ("counts",), "recvobj": ("out",), "recvtag": ("tag",),
    "reduce_op": ("op",), "root_rank": ("root",), "scatter_list": ("x",), "sendbuf": ("x", "obj"),
    "sendcounts": ("counts",), "sendobj": ("x", "obj"), "sendtag": ("tag",), "size": ("shape",),
    "reorder": (), "scatter_object_input_list": ("objs",), "source": ("src", "root"),
    "splits": ("counts",), "src": ("root",), "src_rank": ("src", "root"), "tensor": ("x", "out"),
    "tensor_list": ("out",), "tensors": ("x",), "value": ("x",), "x": ("obj",),
}  # fmt: skip
_AT_ONCE = "{call}(...) without it, which returns when it is done"
#: Advice for foreign keywords for which the function has no parameter.
_REMEDIES = {
    "async_": _AT_ONCE,
    "async_op": _AT_ONCE,
    "blocking": _AT_ONCE,
    "group": "comm.group(ranks).{call}(...)",
    "group_name": "comm.group(ranks).{call}(...)",
    "postscale_factor": "op=collective.premul_sum(factor)",
    "prescale_factor": "op=collective.premul_sum(factor)",
    "process_set": "comm.group(ranks).{call}(...)",
    "timeout": "collective.init(timeout=...), which holds for {call}",
}


def remedy_of(name: str, of: str) -> str | None:
    """Return the code to write instead of a foreign name; None if the name is not in the tables.

    Args:
        of: ``"comm"`` or ``"collective"``: the object on which the name was used.
    """
    if name in _CALL_OF:
        objects = _OF_OBJECTS.get(name)
        return f"{of}.{_CALL_OF[name]}" + (f", or {of}.{objects} for objects" if objects else "")
    if name in _WORDS_OF:
        return _WORDS_OF[name]
    if name in _OF_BOTH:
        return _OF_BOTH[name][of == "collective"]
    return _OF_PACKAGE.get(name) if of == "collective" else None


class _Foreign:
    """Descriptor for a foreign name: any use raises an ``AttributeError`` with the remedy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        remedy = remedy_of(self._name, "comm")
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}; use {remedy}"
        )

    def __set__(self, instance: object, value: object) -> NoReturn:
        self.__get__(instance, type(instance))


def _dir(self: object) -> list[str]:
    """Return the names of an object without the foreign names."""
    return sorted(set(object.__dir__(self)) - _OF_COMMUNICATOR)


if TYPE_CHECKING:

    class ForeignNames:
        """Empty base class: type checkers must not see the foreign names."""

else:
    # A __getattr__ is not used: it would make each access to an existing attribute slower.
    ForeignNames = type(
        "ForeignNames",
        (),
        {"__doc__": "Raises an error with the remedy for each foreign name.", "__dir__": _dir}
        | {name: _Foreign(name) for name in _OF_COMMUNICATOR},
    )


def explain_arguments(function: Any, error: TypeError) -> TypeError:
    """Return a better error for a call with arguments as in another library.

    For a foreign keyword, the new error names the right keyword. For too many positional arguments,
    such as a second array for the result, it names the keywords. Any other error is returned
    unchanged.
    """
    match = re.search(r"takes .*positional arguments? but (\d+) w", str(error))
    if match is not None:
        return _too_many(function, int(match[1]))
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if match is None:
        return error
    own = _parameters(function)
    meant = next((name for name in _KEYWORDS.get(match[1], ()) if name in own), None)
    remedy = f"{meant}=" if meant else _REMEDIES.get(match[1])
    if remedy is None and match[1] not in _KEYWORDS:
        return error
    call = function.__name__
    advice = f"use {remedy.format(call=call)}" if remedy else "it has no equivalent here"
    return _unknown(call, match[1], own, advice)


def _too_many(function: Any, passed: int) -> TypeError:
    """Return the error for a call with too many positional arguments.

    Args:
        passed: number of positional arguments, with ``self`` if the function has it.
    """
    parameters = inspect.signature(function).parameters
    named = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    positional = [name for name in _parameters(function) if name not in named]
    passed -= "self" in parameters
    text = f"{function.__name__}: {passed} positional argument{'s' * (passed != 1)}; expected "
    text += f"at most {len(positional)}: {', '.join(positional)}" if positional else "none"
    if "out" in named:
        text += ". Pass the array for the result as out="
        named.remove("out")
    if named:
        text += f". Keywords: {', '.join(named)}"
    return TypeError(f"{text}.")


def _parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _unknown(call: str, keyword: str, own: list[str], advice: str) -> TypeError:
    allowed = "one of " + ", ".join(own) if own else "it takes none"
    return TypeError(f"{call}: keyword {keyword!r}; {allowed}; {advice}")


def refuses(remedies: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Return a decorator that refuses keywords of a namesake in another library.

    The decorated function raises a ``TypeError`` with the advice, also if it takes any keyword.

    Args:
        remedies: advice for each of these keywords, such as ``"use comm="``.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for keyword in kwargs:
                if keyword in remedies:
                    name = function.__qualname__.removesuffix(".__init__")
                    raise _unknown(name, keyword, _parameters(function), remedies[keyword])
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def explained(function: _Function) -> _Function:
    """Return ``function`` with a better ``TypeError`` for arguments as in another library.

    The wrapper costs 0.3 µs a call. It also holds the memory of the call's arrays during the call,
    as the methods in C do.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        held = hold((*args[1:], *kwargs.values()))
        try:
            result = function(*args, **kwargs)
            if isinstance(result, Work):
                result.keep(held)
            return result
        except TypeError as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:
                raise  # the error comes from inside the function, not from its arguments
            better = explain_arguments(function, error)
        raise better from None

    return cast(_Function, call)
