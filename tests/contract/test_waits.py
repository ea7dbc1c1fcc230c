"""Waits of ranks: their circles, the texts about them, and the words that a peer may write."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from collective.contract.backend import ANY_SOURCE
from collective.contract.failure import LONGER, Failure
from collective.contract.waits import (
    CLOSED,
    DROPPED,
    NO_CALL,
    MessageCall,
    Waiting,
    caller,
    circle,
    departed,
    explain,
    from_wire,
    last_done,
    to_wire,
)
from collective.errors import CollectiveTimeoutError, CommunicatorAbortedError


def message(
    operation: str, to: int | None = None, source: int | None = None, tag: int = 0,
    background: bool = False,
) -> Waiting:  # fmt: skip
    call = MessageCall(operation, tag, to, source)
    ranks = tuple(rank for rank in (to, source) if rank not in (None, ANY_SOURCE))
    return Waiting(str(call), "x.py:4 in main", background, ranks, call)


def recv(source: int, tag: int = 0, background: bool = False) -> Waiting:
    return message("recv", source=source, tag=tag, background=background)


def send(to: int, tag: int = 0) -> Waiting:
    return message("send", to=to, tag=tag)


def collective(*ranks: int, call: str = "barrier()") -> Waiting:
    return Waiting(call, "x.py:9 in main", False, ranks)


def last(rank: int) -> str:
    return last_done(rank, NO_CALL)


# -- circles -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "ranks"),
    [
        pytest.param({0: recv(1), 1: recv(0)}, [0, 1], id="two in recv"),
        pytest.param({0: send(1), 1: send(0)}, [0, 1], id="two in send"),
        pytest.param({0: recv(1), 1: recv(2), 2: recv(0)}, [0, 1, 2], id="three in recv"),
        pytest.param({0: recv(1), 1: send(2), 2: recv(0)}, [0, 1, 2], id="mixed"),
        pytest.param({0: send(1, tag=1), 1: recv(0, tag=2)}, [0, 1], id="tags that differ"),
        pytest.param({0: recv(1), 1: recv(2), 2: recv(1)}, [1, 2], id="beside this rank"),
        pytest.param({0: recv(1), 1: collective(0, 2)}, [0, 1], id="a collective call"),
        pytest.param(
            {0: message("sendrecv", 1, 2), 1: recv(0, tag=9), 2: recv(3)}, [0, 1],
            id="one half of a sendrecv",
        ),
    ],
)  # fmt: skip
def test_circle_of_waits_has_its_ranks(waits: dict[int, Waiting], ranks: list[int]) -> None:
    found = circle(0, {rank: [waiting] for rank, waiting in waits.items()})
    assert sorted(found) == ranks
    assert all(found[rank] is waits[rank] for rank in ranks)


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param({0: recv(1)}, id="a rank that does not wait"),
        pytest.param({0: recv(1), 1: recv(2)}, id="a chain"),
        pytest.param({0: send(1), 1: recv(0)}, id="two ends of one message"),
        pytest.param({0: send(1), 1: recv(ANY_SOURCE)}, id="a receiver from any rank"),
        pytest.param({0: recv(ANY_SOURCE), 1: recv(0)}, id="any rank would do"),
        pytest.param({0: recv(1), 1: recv(0, background=True)}, id="a call in the background"),
        pytest.param({0: collective(1), 1: collective(0)}, id="one collective call"),
        pytest.param(
            {0: message("sendrecv", 1, 1), 1: message("sendrecv", 0, 0)}, id="an exchange"
        ),
    ],
)
def test_waits_that_may_end_are_no_circle(waits: dict[int, Waiting]) -> None:
    assert circle(0, {rank: [waiting] for rank, waiting in waits.items()}) == {}


def test_circle_of_many_ranks_is_found_and_its_text_is_short() -> None:
    waits = {rank: [recv((rank + 1) % 1000)] for rank in range(1000)}
    assert sorted(circle(0, waits)) == list(range(1000))
    text, _ = explain(0, [1], waits, last)
    assert text.startswith("rank 1: 1000 ranks wait for each other:\n  rank 0: recv from rank 1 at")
    assert text.endswith("\n  and 992 more")
    assert text.count("\n") == 9


def test_rank_of_two_threads_is_in_the_circle_of_either() -> None:
    assert sorted(circle(0, {0: [recv(2), recv(1, tag=3)], 1: [recv(0)]})) == [0, 1]


# -- texts -------------------------------------------------------------------------------------


def test_circle_of_recvs_is_described_with_its_remedy() -> None:
    text, remedy = explain(0, [1], {0: [recv(1)], 1: [recv(0, tag=3)]}, last)
    assert text == (
        "rank 1: ranks 0 and 1 wait for each other:\n"
        "  rank 0: recv from rank 1 at x.py:4 in main\n"
        "  rank 1: recv(tag=3) from rank 0 at x.py:4 in main"
    )
    assert remedy == "\nUse sendrecv, or let one rank send first"


@pytest.mark.parametrize(
    ("waits", "remedy"),
    [
        ({0: send(1), 1: send(0)}, "Use sendrecv, or let one rank receive first"),
        ({0: send(1, tag=1), 1: recv(0)}, "Let each send meet its recv, with the same tag"),
        ({0: recv(1), 1: collective(0)}, "Every rank must make the collective calls, and the mess"),
        (
            {0: message("sendrecv", source=1), 1: message("sendrecv", source=0)},
            "Compare dst and src of the sendrecv calls: rank A must pass dst=B where rank B passes",
        ),
        ({0: message("sendrecv", source=1), 1: recv(0)}, "Compare dst and src of the sendrecv"),
    ],
)
def test_remedy_fits_the_kinds_of_calls(waits: dict[int, Waiting], remedy: str) -> None:
    _, found = explain(0, [1], {rank: [waiting] for rank, waiting in waits.items()}, last)
    assert found.startswith(f"\n{remedy}")


def test_circle_does_not_speak_of_a_longer_timeout() -> None:
    text, remedy = explain(0, [1], {0: [recv(1)], 1: [recv(0)]}, last)
    assert "longer timeout" not in Failure.timed_out(0, 3.0, text, [1], remedy).text
    text, remedy = explain(0, [1], {0: [recv(1)]}, last)
    assert Failure.timed_out(0, 3.0, text, [1], remedy).text.endswith(LONGER)


def test_chain_of_waits_is_followed_to_its_end() -> None:
    waits = {0: [recv(1)], 1: [recv(2)], 2: [send(3, tag=5)]}
    assert explain(0, [1], waits, last)[0] == (
        "rank 1: rank 1 is in recv from rank 2 at x.py:4 in main; "
        "rank 2 is in send(tag=5) to rank 3 at x.py:4 in main; rank 3 has made no collective call"
    )


def test_chain_ends_at_a_receive_from_any_rank() -> None:
    receive = Waiting.of(MessageCall("recv", 0, None, ANY_SOURCE), "x.py:4", [0, 2, 3])
    text, _ = explain(0, [1], {0: [recv(1)], 1: [receive]}, last)
    assert text == "rank 1: rank 1 is in recv from any rank in the background at x.py:4"


def test_long_chain_of_waits_is_cut() -> None:
    waits = {rank: [recv(rank + 1)] for rank in range(5000)}
    assert len(explain(0, [1], waits, last)[0]) < 4000


def test_awaited_rank_in_a_collective_call_is_described() -> None:
    text, _ = explain(0, [1], {0: [recv(1)], 1: [collective(2)]}, last)
    assert text == "rank 1: rank 1 is in barrier() at x.py:9 in main"


def test_call_in_the_background_is_described_as_such() -> None:
    text, _ = explain(0, [1], {1: [recv(0, background=True)]}, last)
    assert "rank 1 is in recv from rank 0 in the background at x.py:4 in main" in text


def test_several_late_ranks_are_named_in_the_plural() -> None:
    text, _ = explain(0, [2, 1], {}, last)
    assert text.startswith("ranks 1, 2: ")


def test_late_rank_hears_who_timed_out() -> None:
    failure = Failure.timed_out(0, 3.0, "rank 1: rank 1 has made no collective call", [1])
    waited = failure.error("recv(tag=0)", 0)
    assert isinstance(waited, CollectiveTimeoutError)
    assert str(waited).startswith("recv(tag=0): timed out: waited 3 s for rank 1: ")
    late = failure.error("recv(tag=0)", 1)
    assert isinstance(late, CommunicatorAbortedError)
    assert str(late).startswith(
        "recv(tag=0): rank 0 timed out waiting for this rank: waited 3 s for rank 1: "
    )


_LEFT = {1: (CLOSED, "barrier()")}


def test_rank_that_left_without_the_call_is_described() -> None:
    assert departed(_LEFT, "all_reduce()") == (
        "rank 1 has closed its communicator (its last call: barrier()): it finished, or left its "
        "`with` block, without making this call; every rank must make this call. Is it inside "
        "`if rank == 0`?"
    )


@pytest.mark.parametrize(
    ("call", "deed"),
    [
        (MessageCall("recv", 0, None, 1), "sending"),
        (MessageCall("recv", 0, None, ANY_SOURCE), "sending"),
        (MessageCall("send", 0, 1, None), "receiving"),
        (MessageCall("sendrecv", 0, 1, 2), "receiving"),
        (MessageCall("sendrecv", 0, 1, 1), "receiving and sending"),
    ],
)
def test_rank_that_left_without_the_message_is_described(call: MessageCall, deed: str) -> None:
    assert departed(_LEFT, call).endswith(f"`with` block, without {deed} this message")


def test_rank_that_died_did_not_leave() -> None:
    text = departed({1: ("(pid 7) has died", "barrier()")}, "barrier()")
    assert text == "rank 1 (pid 7) has died (its last call: barrier())"


def test_ranks_that_left_are_told_from_ranks_that_died() -> None:
    text = departed({1: (DROPPED, "none"), 2: ("(pid 7) has died", "none")}, "barrier()")
    assert "without closing it (its last call: none); rank 2 (pid 7) has died" in text
    assert "(its last call: none): rank 1 finished, or left" in text


# -- descriptions of running calls -----------------------------------------------------------------


def test_waiting_names_the_place_of_another_thread() -> None:
    ready, end = threading.Event(), threading.Event()
    who: list[Any] = []

    def waits_here() -> None:
        who.append(caller())
        ready.set()
        end.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    assert ready.wait(60)
    waiting = Waiting.of("barrier()", who[0], [1])
    end.set()
    thread.join()
    assert "test_waits.py:" in waiting.site
    assert waiting.site.endswith(" in waits_here")
    assert Waiting.of("barrier()", who[0], [1]).site == ""


def test_part_of_a_sendrecv_that_is_done_is_not_described() -> None:
    call = MessageCall("sendrecv", 0, 1, 2)
    assert str(Waiting.of(call, "x.py:4", [1])).startswith("sendrecv to rank 1 in the background")
    assert str(Waiting.of(call, "x.py:4", [2])).startswith("sendrecv from rank 2 in")
    assert str(Waiting.of(call, "x.py:4", [1, 2])).startswith("sendrecv to rank 1 and from rank 2")
    swap = MessageCall("sendrecv", 0, 1, 1)
    assert str(Waiting.of(swap, "x.py:4", [1])).startswith("sendrecv with rank 1 in")


def test_recv_from_any_rank_is_described() -> None:
    call = MessageCall("recv", 0, None, ANY_SOURCE)
    assert str(Waiting.of(call, "x.py:4", [1, 2])).startswith("recv from any rank in")


@pytest.mark.parametrize(
    "waiting", [recv(1), send(0, tag=7), message("sendrecv", 1, ANY_SOURCE), collective(1, 2)]
)
def test_description_is_read_as_it_was_written(waiting: Waiting) -> None:
    assert Waiting.read(waiting.wire()) == waiting
    assert from_wire(to_wire([waiting])) == [waiting]


GOOD = recv(1).wire()


@pytest.mark.parametrize(
    "wire",
    [
        None, 7, "recv", {}, [], GOOD[:4], [*GOOD, 1], [7, *GOOD[1:]], ["recv", 7, *GOOD[2:]],
        ["recv", "", 0, [1], None], ["recv", "", False, 1, None], ["recv", "", False, [-1], None],
        ["recv", "", False, [True], None], ["recv", "", False, ["1"], None],
        ["recv", "", False, [1 << 40], None], ["recv", "", False, [1] * 17, None],
        ["recv", "", False, [1], 7], ["recv", "", False, [1], []],
        ["recv", "", False, [1], ["scan", 0, None, 1]], ["recv", "", False, [1], ["recv", 0, 1]],
        ["recv", "", False, [1], ["recv", None, None, 1]],
        ["recv", "", False, [1], ["recv", 1 << 70, None, 1]],
        ["recv", "", False, [1], ["recv", 0, -1, None]],
        ["recv", "", False, [1], ["recv", 0, None, -2]],
    ],
)  # fmt: skip
def test_damaged_description_is_ignored(wire: Any) -> None:
    assert Waiting.read(wire) is None
    assert from_wire([wire, GOOD]) == [recv(1)]


def test_description_of_a_peer_is_bounded_and_on_one_line() -> None:
    found = Waiting.read(["a\nb\x1b[31m" + "x" * 900, "y" * 900 + "\n", False, [1], None])
    assert found is not None
    assert found.call.startswith("a?b?[31mxx")
    assert len(found.call) <= 200
    assert len(found.site) <= 200


def test_number_of_descriptions_of_a_peer_is_bounded() -> None:
    assert len(from_wire([GOOD] * 50)) == 3
    assert len(to_wire([recv(1)] * 50)) == 3


def test_calls_that_block_the_program_are_described_first() -> None:
    waits = [recv(rank, background=True) for rank in range(1, 5)]
    assert from_wire(to_wire([*waits, recv(9)]))[0] == recv(9)


def test_long_place_in_the_program_keeps_its_end() -> None:
    waiting = Waiting.of("barrier()", "/folder" * 90 + "/x.py:4 in main", [1])
    assert len(waiting.site) == 200
    assert waiting.site.startswith("...")
    assert waiting.site.endswith("/x.py:4 in main")
