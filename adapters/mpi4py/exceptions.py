"""Error classes and codes, ``MPI.Exception``, and the refusals."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import total_ordering
from typing import Any, NoReturn

import collective

_NAMES = (
    "BUFFER COUNT TYPE TAG COMM RANK REQUEST ROOT GROUP OP TOPOLOGY DIMS ARG UNKNOWN TRUNCATE "
    "OTHER INTERN PENDING IN_STATUS ACCESS AMODE ASSERT BAD_FILE BASE CONVERSION DISP DUP_DATAREP "
    "FILE_EXISTS FILE_IN_USE FILE INFO_KEY INFO_NOKEY INFO_VALUE INFO IO KEYVAL LOCKTYPE NAME "
    "NO_MEM NOT_SAME NO_SPACE NO_SUCH_FILE PORT QUOTA READ_ONLY RMA_CONFLICT RMA_SYNC SERVICE SIZE "
    "SPAWN UNSUPPORTED_DATAREP UNSUPPORTED_OPERATION WIN RMA_RANGE RMA_ATTACH RMA_FLAVOR "
    "RMA_SHARED PROC_ABORTED SESSION VALUE_TOO_LARGE ERRHANDLER ABI PROC_FAILED "
    "PROC_FAILED_PENDING REVOKED"
).split()
# Texts of the classes whose names alone do not say what is wrong.
_TEXTS = {f"ERR_{name}": f"invalid {name.lower()}" for name in _NAMES[:13]} | {
    "SUCCESS": "no error",
    "ERR_TYPE": "invalid datatype",
    "ERR_COMM": "invalid communicator",
    "ERR_OP": "invalid operator",
    "ERR_DIMS": "invalid dimensions",
    "ERR_ARG": "invalid argument",
    "ERR_TRUNCATE": "the message is longer than the buffer",
    "ERR_OTHER": "another error",
    "ERR_INTERN": "internal error",
    "ERR_IN_STATUS": "the error is in the status",
}
#: Error classes of MPI by name, with their numbers.
CLASSES = {"SUCCESS": 0} | {f"ERR_{name}": number for number, name in enumerate(_NAMES, 1)}
LASTCODE = 0x3FFF
CLASSES["ERR_LASTCODE"] = LASTCODE
_texts: dict[int, str] = {
    number: f"MPI_{name}: {_TEXTS.get(name) or name[4:].lower().replace('_', ' ')}"
    for name, number in CLASSES.items()
}
# Classes and codes that the program has added, each code with its class.
_added: dict[int, int] = {}
# By these the keyval LASTUSEDCODE is answered.
last_used = [LASTCODE]


@total_ordering
class MPIError(RuntimeError):
    """Error of a call, with MPI's error code.

    Args:
        ierr: an error code.
        text: what is wrong; by default the text of the code.
    """

    def __init__(self, ierr: int = 0, text: str = "", /) -> None:
        self.ierr = ierr = int(ierr)
        if ierr < 0:
            self.ierr = ierr = CLASSES["ERR_UNKNOWN"]
        self._text = text
        super().__init__(ierr)

    def __str__(self) -> str:
        return self._text or self.Get_error_string()

    def __repr__(self) -> str:
        return f"MPI.Exception({self.ierr})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ierr, self._text)

    def __int__(self) -> int:
        return self.ierr

    def __bool__(self) -> bool:
        return self.ierr != 0

    def __hash__(self) -> int:
        return hash(self.ierr)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MPIError):
            return self.ierr == other.ierr
        return self.ierr == other if isinstance(other, int) else NotImplemented

    def __lt__(self, other: Any) -> bool:
        return self.ierr < int(other)

    def Get_error_code(self) -> int:
        """Return the error code."""
        return self.ierr

    def Get_error_class(self) -> int:
        """Return the class of the error code."""
        return Get_error_class(self.ierr)

    def Get_error_string(self) -> str:
        """Return the text of the error code."""
        return Get_error_string(self.ierr)

    error_code = property(Get_error_code)
    error_class = property(Get_error_class)
    error_string = property(Get_error_string)


MPIError.__name__ = MPIError.__qualname__ = "Exception"  # its name in mpi4py


class MissingPartError(NotImplementedError):
    """Part of MPI that this module does not have; the text says why, and what to use."""


def refuse(what: str, why: str, instead: str) -> NoReturn:
    """Raise MissingPartError. Every rank comes to it by its own arguments, so no rank waits."""
    raise MissingPartError(f"{what}: collective.adapters.mpi4py does not have it: {why}. {instead}")


def refusing(what: str, why: str, instead: str) -> Any:
    """Return a function that refuses whatever its arguments."""

    def function(*args: Any, **options: Any) -> NoReturn:
        refuse(what, why, instead)

    function.__name__ = what.rpartition(".")[2]
    function.__doc__ = f"Refuse: {why}."
    return function


def refuse_all(cls: Any, names: str, why: str, instead: str) -> None:
    """Let methods of a class refuse, by names that spaces separate."""
    for name in names.split():
        setattr(cls, name, refusing(f"{cls.__name__}.{name}", why, instead))


def Get_error_class(errorcode: int) -> int:
    """Return the class of an error code."""
    if errorcode in _added:
        return _added[errorcode]
    return errorcode if errorcode in _texts else CLASSES["ERR_UNKNOWN"]


def Get_error_string(errorcode: int) -> str:
    """Return the text of an error code."""
    if errorcode not in _texts and errorcode not in _added:
        raise MPIError(CLASSES["ERR_ARG"])
    return _texts.get(errorcode, "")


def Add_error_class() -> int:
    """Add an error class, and return it."""
    last_used[0] += 1
    _added[last_used[0]] = last_used[0]
    return last_used[0]


def Add_error_code(errorclass: int) -> int:
    """Add an error code of a class, and return it."""
    code = Add_error_class()
    _added[code] = errorclass
    return code


def Remove_error_class(errorclass: int) -> None:
    """Remove an added error class without codes and text."""
    if any(value == errorclass for code, value in _added.items() if code != errorclass):
        raise MPIError(CLASSES["ERR_OTHER"], f"Remove_error_class: {errorclass} has codes")
    Remove_error_code(errorclass)


def Remove_error_code(errorcode: int) -> None:
    """Remove an added error code without text."""
    if errorcode not in _added or errorcode in _texts:
        text = f"{errorcode} is not an added code without a text"
        raise MPIError(CLASSES["ERR_OTHER"], text)
    del _added[errorcode]
    last_used[0] = max([LASTCODE, *_added])


def Add_error_string(errorcode: int, string: str) -> None:
    """Give an added error code a text."""
    if errorcode not in _added:
        raise MPIError(CLASSES["ERR_OTHER"], f"Add_error_string: {errorcode} was not added")
    _texts[errorcode] = string


def Remove_error_string(errorcode: int) -> None:
    """Take the text of an added error code away."""
    if errorcode not in _added or errorcode not in _texts:
        raise MPIError(CLASSES["ERR_OTHER"], f"Remove_error_string: {errorcode} has none")
    del _texts[errorcode]


_KINDS: list[tuple[type[BaseException], str]] = [
    (collective.PeerLostError, "ERR_PROC_FAILED"),
    (collective.PeerFailedError, "ERR_PROC_FAILED"),
    (collective.CommunicatorAbortedError, "ERR_PROC_ABORTED"),
    (collective.CommunicatorClosedError, "ERR_COMM"),
    (collective.ShapeError, "ERR_TRUNCATE"),
    (collective.RankError, "ERR_RANK"),
]


def translated(error: BaseException) -> MPIError:
    """Return the ``MPI.Exception`` for an error of the library, with the library's text."""
    name = next((name for kind, name in _KINDS if isinstance(error, kind)), "ERR_OTHER")
    return MPIError(CLASSES[name], f"MPI_{name}: {error}")


def guarded(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of a program's function; its error is printed, and is ``ERR_OTHER``."""
    try:
        return function(*args, **options)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, MPIError):
            raise
        raise MPIError(CLASSES["ERR_OTHER"], f"{function!r}: {error!r}") from error


class _Translated:
    """Block in which errors of the library become ``MPI.Exception``."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, collective.CollectiveError):
            raise translated(error) from error


TRANSLATED = _Translated()
