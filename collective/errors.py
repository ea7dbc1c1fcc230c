"""The error tree.

::

    CollectiveError (RuntimeError)
    ├ InvalidArgumentError (ValueError)      refused before anything is sent
    │ ├ DtypeError, ShapeError, DeviceError, RankError
    ├ ConfigError (ValueError)               a setting that is unknown, malformed or contradictory
    ├ AllocationError (MemoryError)          symmetric memory that some rank cannot have
    ├ MismatchError                          ranks disagree; raised on every rank
    ├ RanksJoinError                         processes join elastic training; nothing is wrong
    ├ StateLostError                         what only lost ranks had of a sharded state; names it
    ├ GradientError                          a backward pass did not bring each gradient once
    ├ UnsupportedError (NotImplementedError) this transport can't; names one that can
    ├ BackendNotFoundError (LookupError)     lists the known names
    ├ BackendUnavailableError (ImportError)  carries the install command
    ├ RendezvousError                        somebody did not arrive; says who
    ├ CommunicatorClosedError                you closed it, or it is your parent process's
    ├ CommunicatorAbortedError               it broke, or somebody aborted it; says who
    │ ├ PeerLostError                        a peer's process is gone, or left early
    │ ├ PeerFailedError                      a peer's code raised; carries its traceback
    │ └ ExcludedError                        the others went on without this rank
    ├ CollectiveTimeoutError (TimeoutError)  the deadline passed; names the absent ranks
    └ BackendError                           the transport's own library failed

Wording, everywhere: *operation: given; allowed; who; remedy.*
"""

from __future__ import annotations

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


class CollectiveError(RuntimeError):
    """Base of every error this package raises on purpose.

    A ``RuntimeError``, as what PyTorch's and MPI's own transports raise is: programs written for
    those catch it.
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
    """A setting is unknown, malformed, or contradicts another; says where it came from."""


class AllocationError(CollectiveError, MemoryError):
    """Some rank has no memory for a collective allocation.

    Raised on every rank; nothing was allocated, and the communicator stays usable.
    """


class MismatchError(CollectiveError):
    """The ranks made different calls where one collective call was due.

    Raised on every rank with the same text: which rank did what, and where in its
    program. Nothing was reduced or overwritten, and the communicator stays usable.
    """


class StateLostError(CollectiveError):
    """Ranks are lost that had something of the training's state which no other rank has.

    Raised on every rank that is left. All have to start again, from what is on disk.
    """


class RanksJoinError(CollectiveError):
    """Processes wait to join: the body of ``elastic.generations`` ends here, to be run with them.

    Raised by ``State.commit()`` on every rank, when it has kept the state. Nothing is wrong.
    """


class GradientError(CollectiveError):
    """A backward pass did not bring each gradient once."""


class UnsupportedError(CollectiveError, NotImplementedError):
    """The transport cannot do this; the text names one that can."""


class BackendNotFoundError(CollectiveError, LookupError):
    """No transport of that name is registered; the text lists the known ones."""


# Here and below, what has attributes of its own stands first: RuntimeError's constructor would
# leave them unset.
class BackendUnavailableError(ImportError, CollectiveError):
    """The transport exists but cannot run here; the text carries the command that fixes it."""


class RendezvousError(CollectiveError):
    """The ranks could not find each other; the text names those who did not arrive."""


class CommunicatorClosedError(CollectiveError):
    """The communicator was used after this rank closed it, or in a forked child of the rank's."""


class CommunicatorAbortedError(CollectiveError):
    """The communicator is broken and stays so; the text says who broke it and why.

    After it, output buffers of the interrupted call hold some, all or none of the
    result. Inputs that are not outputs are untouched.
    """


class PeerLostError(CommunicatorAbortedError):
    """A peer's process died, or left the communicator while others still needed it.

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
    """The others went on without this rank: they took it for lost, or excluded it.

    Nobody waits for it any more. It can only leave.
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
