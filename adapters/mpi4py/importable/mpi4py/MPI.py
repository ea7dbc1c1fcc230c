"""``mpi4py.MPI`` over collective: names of mpi4py for the modules of this adapter.

The ranks connect when this module is imported.
"""

# ruff: noqa: A001
from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

from collective.adapters.mpi4py import (
    attributes,
    communicators,
    datatypes,
    environment,
    exceptions,
    groups,
    handles,
    info,
    memory,
    operations,
    operators,
    pickling,
    requests,
    topologies,
    windows,
)  # fmt: skip

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


COMM_WORLD, COMM_SELF = communicators.begin()

_OF_MODULES = {
    attributes: "KEYVAL_INVALID Errhandler ERRHANDLER_NULL ERRORS_RETURN ERRORS_ABORT "
    "ERRORS_ARE_FATAL",
    communicators: "Comm Intercomm Intracomm COMM_NULL COMM_TYPE_SHARED COMM_TYPE_HW_GUIDED "
    "COMM_TYPE_HW_UNGUIDED COMM_TYPE_RESOURCE_GUIDED ROOT",
    datatypes: "Datatype DATATYPE_NULL ORDER_C ORDER_FORTRAN TYPECLASS_LOGICAL TYPECLASS_INTEGER "
    "TYPECLASS_REAL TYPECLASS_COMPLEX DISTRIBUTE_NONE DISTRIBUTE_BLOCK DISTRIBUTE_CYCLIC "
    "DISTRIBUTE_DFLT_DARG",
    environment: "THREAD_SINGLE THREAD_FUNNELED THREAD_SERIALIZED THREAD_MULTIPLE VERSION "
    "SUBVERSION MAX_PROCESSOR_NAME MAX_OBJECT_NAME MAX_DATAREP_STRING MAX_ERROR_STRING "
    "MAX_PORT_NAME MAX_LIBRARY_VERSION_STRING MAX_PSET_NAME_LEN MAX_STRINGTAG_LEN Init Init_thread "
    "Finalize Is_initialized Is_finalized Query_thread Is_thread_main Get_version "
    "Get_library_version Get_abi_version Get_abi_info Get_abi_fortran_info get_vendor "
    "Get_processor_name Get_hw_resource_info Wtime Wtick Pcontrol Alloc_mem Free_mem Get_address "
    "Aint_add Aint_diff Open_port "
    "Close_port Publish_name Unpublish_name Lookup_name Register_datarep _typealign "
    "_sizeof _addressof _handleof",
    exceptions: "Get_error_class Get_error_string Add_error_class Add_error_code Add_error_string "
    "Remove_error_class Remove_error_code Remove_error_string",
    groups: "Group GROUP_NULL GROUP_EMPTY UNDEFINED PROC_NULL IDENT CONGRUENT SIMILAR UNEQUAL",
    handles: "BOTTOM IN_PLACE BUFFER_AUTOMATIC BottomType InPlaceType BufferAutomaticType",
    info: "Info INFO_NULL INFO_ENV MAX_INFO_KEY MAX_INFO_VAL",
    memory: "buffer",
    operators: "Op OP_NULL",
    pickling: "Pickle pickle",
    operations: "Status ANY_SOURCE ANY_TAG",
    requests: "Request REQUEST_NULL Prequest Grequest Message MESSAGE_NULL MESSAGE_NO_PROC",
    topologies: "Topocomm Cartcomm Graphcomm Distgraphcomm Compute_dims CART GRAPH DIST_GRAPH "
    "UNWEIGHTED WEIGHTS_EMPTY",
    windows: "Win WIN_NULL File FILE_NULL Session SESSION_NULL",
}
for _module, _names in _OF_MODULES.items():
    for _name in _names.split():
        globals()[_name] = getattr(_module, _name)
globals().update(exceptions.CLASSES)
globals().update(datatypes.CONSTANTS)
globals().update(operators.OPERATORS)
globals().update(communicators.KEYVALS)
globals().update({f"COMBINER_{name}": value for name, value in datatypes.COMBINERS.items()})

Exception = exceptions.MPIError
# The process and COMM_SELF have one buffer for buffered sends, which need none.
Attach_buffer, Detach_buffer = COMM_SELF.Attach_buffer, COMM_SELF.Detach_buffer
Flush_buffer, Iflush_buffer = COMM_SELF.Flush_buffer, COMM_SELF.Iflush_buffer
ORDER_F = datatypes.ORDER_FORTRAN
memory = memory.buffer  # type: ignore[assignment]
_typedict, _typedict_c = datatypes.CODES, datatypes.CODES_C
_typedict_f = datatypes.CODES_F
F_SOURCE, F_TAG, F_ERROR, F_STATUS_SIZE = 0, 1, 2, 5
BSEND_OVERHEAD = 0
WIN_BASE, WIN_SIZE, WIN_DISP_UNIT, WIN_CREATE_FLAVOR, WIN_MODEL = range(11, 16)
WIN_FLAVOR = WIN_CREATE_FLAVOR
WIN_FLAVOR_CREATE, WIN_FLAVOR_ALLOCATE, WIN_FLAVOR_DYNAMIC, WIN_FLAVOR_SHARED = range(1, 5)
WIN_SEPARATE, WIN_UNIFIED = 0, 1
MODE_NOCHECK, MODE_NOSTORE, MODE_NOPUT, MODE_NOPRECEDE, MODE_NOSUCCEED = (
    1024, 2048, 4096, 8192, 16384,
)  # fmt: skip
LOCK_EXCLUSIVE, LOCK_SHARED = 1, 2
MODE_RDONLY, MODE_WRONLY, MODE_RDWR, MODE_CREATE, MODE_EXCL = 2, 4, 8, 1, 64
MODE_DELETE_ON_CLOSE, MODE_UNIQUE_OPEN, MODE_SEQUENTIAL, MODE_APPEND = 16, 32, 256, 128
SEEK_SET, SEEK_CUR, SEEK_END = 0, 1, 2
DISPLACEMENT_CURRENT = DISP_CUR = -54278278

# Objects pickle as those of mpi4py.
for _value in list(globals().values()):
    _has_name = isinstance(_value, (type, FunctionType))
    if _has_name and _value.__module__.startswith("collective.adapters.mpi4py."):
        _value.__module__ = __name__
del _module, _names, _name, _value, _has_name
