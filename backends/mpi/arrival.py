"""The first step of every collective call: all ranks come, and say what they want."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from collective.errors import CommunicatorAbortedError
from collective.request import Disagreement

from .library import leave_unfinished
from .polling import POLLS, finish, settle

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.request import Request

__all__ = ["BLOCKING", "BY_MESSAGES", "POLLED", "Arrival"]

#: How the ranks carry a call out, each better able than the one before to do without the
#: others being in the same: the highest that any of them asks for counts.
BLOCKING, POLLED, BY_MESSAGES = 0, 1, 2


class Arrival:
    """Compares the ranks' calls: one reduction of 24 bytes, non-blocking and polled.

    All ranks made the same call if the largest digest is the smallest one, too. The
    reduction is a persistent one where MPI has them (MPI 4.1, section 6.13): starting it again
    takes less than half the time.
    """

    def __init__(self, module: Any, comm: Any, channel: Channel) -> None:
        self._module = module
        self._comm = comm
        self._channel = channel
        # The digest, its negative and how; not NumPy's: an element takes it thrice as long.
        self._words = array("q", [0, 0, 0])
        self._found = array("q", [0, 0, 0])
        self._request: Any = None
        self._over: BaseException | None = None
        self._digest, self._how = 0, 0
        try:
            self._request = comm.Allreduce_init(self._words, self._found, module.MAX)
        except (NotImplementedError, module.Exception):
            self._persistent = False
        else:
            self._persistent = True
            self._start, self._test = self._request.Start, self._request.Test

    def arrive(self, request: Request, timeout: float, how: int) -> int:
        """Return when all ranks have come, with the highest of their ``how``.

        Raises:
            Disagreement: on every rank, with all headers.
            CollectiveError: a rank did not come, and never will.
        """
        if self._channel.failure is not None or self._over is not None:
            self._refuse(request)
        digest = request.digest
        if digest != self._digest or how != self._how:
            words = self._words
            words[0], words[1], words[2] = digest, -digest, how
            self._digest, self._how = digest, how
        if self._persistent:
            self._start()
            test = self._test
        else:
            self._request = self._comm.Iallreduce(self._words, self._found, self._module.MAX)
            test = self._request.Test
        for _ in POLLS:
            if test():
                break
        else:
            self._wait(test, request, timeout)
        found = self._found
        if found[0] != digest or found[1] != -digest:
            self._disagree(request, timeout)
        return found[2]

    def _wait(self, test: Any, request: Request, timeout: float) -> None:
        try:
            finish(test, self._channel.wait(request, timeout), moving=False)
        except BaseException as error:
            self._over = error
            # With the memory, which a persistent request does not keep: whoever comes late makes
            # MPI write to it, be it Python's again by then.
            leave_unfinished((self._request, self._words, self._found))
            raise

    def _refuse(self, request: Request) -> NoReturn:
        """Raise what a call raises when its communicator is broken."""
        self._channel.check(request)
        # It was interrupted, and its communicator is only about to be broken.
        raise CommunicatorAbortedError(f"{request}: {self._over} (that was an earlier call)")

    def _disagree(self, request: Request, timeout: float) -> None:
        """Tell the ranks' calls to each other; all of them come here."""
        header = np.frombuffer(request.header(), np.uint8)
        lengths = np.zeros(self._comm.Get_size(), np.int64)
        mine = np.array([header.size], np.int64)

        def over(moving: Any) -> None:
            settle([moving], lambda: self._channel.wait(request, timeout))

        over(self._comm.Iallgather(mine, lengths))
        every = np.empty(int(lengths.sum()), np.uint8)
        counts = lengths.tolist()
        over(self._comm.Iallgatherv(header, [every, counts, None, self._module.BYTE]))
        parts = np.split(every, np.cumsum(counts)[:-1])
        raise Disagreement([part.tobytes() for part in parts])

    def close(self) -> bool:
        """Free what MPI holds; return whether nothing is running any more."""
        if self._over is not None:
            return False
        if self._persistent:
            self._request.Free()
        return True
