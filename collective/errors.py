"""The tree of error classes.

::

    CollectiveError (RuntimeError)
    ├ InvalidArgumentError (ValueError)      an argument, refused before anything is sent
    │ ├ DtypeError, ShapeError, DeviceError, RankError
    ├ ConfigError (ValueError)               a setting that is unknown, malformed or contradictory
    ├ AllocationError (MemoryError)          some rank has no memory for a symmetric allocation
    ├ MismatchError                          the ranks' calls differ; raised on every rank
    ├ CorruptionError                        results are not what they must be; names the ranks
    ├ RanksJoinError                         processes join elastic training; not a failure
    ├ StateLostError                         parts of a sharded state are lost; names the parts
    ├ GradientError                          a backward pass did not produce each gradient once
    ├ UnsupportedError (NotImplementedError) this transport can't; names one that can
    ├ BackendNotFoundError (LookupError)     no such transport; lists the known names
    ├ BackendUnavailableError (ImportError)  the transport can't run; has the install command
    ├ RendezvousError                        some rank did not arrive; names it
    ├ CommunicatorClosedError                this rank closed it, or a forked child used it
    ├ CommunicatorAbortedError               it broke, or a rank aborted it; names the rank
    │ ├ PeerLostError                        a peer's process died, or left early
    │ ├ PeerFailedError                      a peer's code raised; carries its traceback
    │ └ ExcludedError                        the other ranks continued without this rank
    ├ CollectiveTimeoutError (TimeoutError)  the deadline passed; names the absent ranks
    └ BackendError                           the transport's own library failed

Every error text has the form *operation: given; allowed; who; remedy.*
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

__all__ = [
    "AllocationError",
    "BackendError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "CommunicatorAbortedError",
    "CommunicatorClosedError",
    "ConfigError",
    "CorruptionError",
    "DeviceError",
    "DtypeError",
    "ExcludedError",
    "GradientError",
    "InvalidArgumentError",
    "MismatchError",
    "PeerFailedError",
    "PeerLostError",
    "RankError",
    "RanksJoinError",
    "RendezvousError",
    "ShapeError",
    "StateLostError",
    "UnsupportedError",
]


#: Folders of the package, whose frames are internal: its own, and the one to which an editable
#: installation links.
HOMES = tuple({os.path.dirname(path) + os.sep for path in (__file__, os.path.realpath(__file__))})


def outer_frames(
    trace: TracebackType | None, folders: tuple[str, ...] = HOMES
) -> TracebackType | None:
    """Return a traceback without its frames in ``folders``; all of it if no other frame is left."""
    frames = []
    each = trace
    while each is not None:
        frames.append(each)
        each = each.tb_next
    kept = None
    for each in reversed(frames):
        if not each.tb_frame.f_code.co_filename.startswith(folders):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept or trace


class ToldByText:
    """Base of exceptions whose text says more than the frames inside this package."""

    __slots__ = ()

    def _render_traceback_(self: BaseException) -> list[str]:  # type: ignore[misc]
        """Return the lines that IPython shows: the frames of the user's program and the text."""
        shells = [sys.modules[name] for name in ("IPython", "ipykernel") if name in sys.modules]
        folders = (*HOMES, *(os.path.dirname(str(shell.__file__)) + os.sep for shell in shells))
        trace = outer_frames(self.__traceback__, folders)
        return "".join(traceback.format_exception(type(self), self, trace)).splitlines()


class CollectiveError(ToldByText, RuntimeError):
    """Base class of every error that this package raises on purpose.

    It is a ``RuntimeError``, like the errors of PyTorch's and MPI's own transports. So programs
    that were written for those transports catch it.
    """


class InvalidArgumentError(CollectiveError, ValueError):
    """An argument was refused before anything was sent; the communicator stays usable."""


class DtypeError(InvalidArgumentError):
    """The element type does not fit the operation, or two arrays of one call differ in it."""


class ShapeError(InvalidArgumentError):
    """A shape, an axis or a list of counts does not fit the call."""


class DeviceError(InvalidArgumentError):
    """An array lives on a device that the transport cannot reach, or on two devices at once."""


class RankError(InvalidArgumentError):
    """A rank (``root``, ``src``, ``dst``, a member of a group) is outside the communicator."""


class ConfigError(CollectiveError, ValueError):
    """A setting is unknown or malformed, or contradicts another one; the text names its source."""


class AllocationError(CollectiveError, MemoryError):
    """Some rank has no memory for a collective allocation.

    It is raised on every rank. Nothing was allocated, and the communicator stays usable.
    """


class MismatchError(CollectiveError):
    """The ranks made different calls where one collective call was due.

    It is raised on every rank with the same text: which rank made which call, and where in its
    program. Nothing was reduced or overwritten, and the communicator stays usable.
    """


class CorruptionError(CollectiveError):
    """The results of a call are not what they must be: a bit of memory or of a message has changed.

    Only ``COLLECTIVE_CHECK=results`` finds this. After a collective call every rank raises it, with
    the same ranks; after a message, only the receiver. The communicator stays usable. The call's
    results are not to be used on any rank.

    Attributes:
        ranks: the ranks whose result is wrong, ascending; all ranks if no majority has the same
            result. After a call that is made twice, the ranks whose two results differ.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class StateLostError(CollectiveError):
    """Some lost ranks held parts of the training state that no surviving rank has.

    It is raised on every surviving rank. All ranks must start again from the state on disk.
    """


class RanksJoinError(CollectiveError):
    """Processes wait to join, so the body of ``elastic.generations`` is run again with them.

    ``State.commit()`` raises it on every rank after it has saved the state, to leave the body. It
    is not a failure.
    """


class GradientError(CollectiveError):
    """A backward pass did not produce each gradient exactly once."""


class UnsupportedError(CollectiveError, NotImplementedError):
    """The transport cannot do this; the text names one that can."""


class BackendNotFoundError(CollectiveError, LookupError):
    """No transport of that name is registered; the text lists the known ones."""


# In the classes below, the base class that has attributes of its own (ImportError, TimeoutError)
# comes first: the constructor of RuntimeError would leave these attributes unset.
class BackendUnavailableError(ImportError, CollectiveError):
    """The transport exists but cannot run here; the text carries the command that fixes it."""


class RendezvousError(CollectiveError):
    """The ranks could not find each other; the text names those who did not arrive."""


class CommunicatorClosedError(CollectiveError):
    """This rank has closed the communicator, perhaps in another thread during the call.

    A forked child of this rank cannot use the communicator, either.
    """


class CommunicatorAbortedError(CollectiveError):
    """The communicator is broken and stays so; the text says who broke it and why.

    Output buffers of the interrupted call then hold some, all or none of the result. Inputs that
    are not outputs are unchanged.
    """


class PeerLostError(CommunicatorAbortedError):
    """A peer's process died, or left the communicator while other ranks still needed it.

    Attributes:
        ranks: the lost ranks, ascending.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class PeerFailedError(CommunicatorAbortedError):
    """A peer's code raised inside the communicator's ``with`` body.

    Attributes:
        rank: the rank that raised.
        traceback: its traceback as text.
    """

    def __init__(self, message: str, rank: int = -1, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class ExcludedError(CommunicatorAbortedError):
    """The other ranks continued without this rank: they considered it lost, or excluded it.

    No rank waits for this rank any more. It can only leave.
    """


class CollectiveTimeoutError(TimeoutError, CollectiveError):
    """The deadline of a call passed.

    Attributes:
        ranks: the ranks that did not arrive, ascending.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class BackendError(CollectiveError):
    """The transport's own library reported an error.

    Attributes:
        backend: the transport's name.
        code: the library's error code, where it has one.
    """

    def __init__(self, message: str, backend: str = "", code: int | None = None) -> None:
        super().__init__(message)
        self.backend = backend
        self.code = code
