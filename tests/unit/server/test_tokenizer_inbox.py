"""What the tokenizer process takes next: long frames in slices, short ones in between, aborts behind their requests."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from pdserve.messages.control import Ping
from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.messages.outputs import FinishType
from pdserve.messages.requests import AbortReq, ChatRendered, TokenizeReq
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.sessions import SnapshotReq
from pdserve.messages.text import DecodeReq, EncodeReq
from pdserve.server.tokenizer_inbox import SLICE, SLICE_WORK, TICK_MESSAGES, TokenizerInbox


class Frames:
    """A channel with frames that wait. Waiting for more than there are would be for ever."""

    def __init__(self) -> None:
        self.waiting: deque[list[Any]] = deque()

    def recv(self, timeout: int) -> list[Any]:
        assert self.waiting or timeout == 0, "would wait for ever"
        return self.waiting.popleft() if self.waiting else []


def req(rid: str, text: str = "a", forks: Sequence[str] = ()) -> TokenizeReq:
    return TokenizeReq(rid=rid, sampling=SamplingParams(seed=1), arrival=0.0, text=text, forks=list(forks))


def long_req(rid: str, forks: Sequence[str] = ()) -> TokenizeReq:
    """Make a request that is a slice by itself."""
    return req(rid, "a" * (SLICE_WORK + 1), forks)


def names(messages: list[Any]) -> list[str]:
    return [m.rid if isinstance(m, TokenizeReq) else f"-{m.rid}" if isinstance(m, AbortReq) else "?" for m in messages]


def ends(ended: list[Any]) -> list[str]:
    """Rids of the answers that ended as aborted."""
    items = [item for batch in ended for item in batch.items]
    assert all(item.finish.type is FinishType.ABORT for item in items)
    return [item.rid for item in items]


def inbox(*frames: list[Any]) -> tuple[TokenizerInbox, Frames]:
    channel = Frames()
    channel.waiting.extend(frames)
    return TokenizerInbox(channel, "unified"), channel  # type: ignore[arg-type]


def test_short_frames_are_taken_together_up_to_a_limit() -> None:
    box, channel = inbox(*([req(str(i))] for i in range(TICK_MESSAGES + 3)))
    assert len(box.next_tick().messages) == TICK_MESSAGES
    assert names(box.next_tick().messages) == [str(TICK_MESSAGES + i) for i in range(3)]
    assert not channel.waiting


def test_what_comes_during_a_long_frame_overtakes_it_but_aborts() -> None:
    batch = [f"b{i}" for i in range(2 * SLICE + 5)]
    box, channel = inbox([req(rid) for rid in batch])
    assert names(box.next_tick().messages) == batch[:SLICE]
    channel.waiting.append([Ping(id=1), req("quick")])
    channel.waiting.append([AbortReq(rid=batch[-1]), AbortReq(rid="quick")])
    # "quick" was passed on before its abort, which need not wait.
    assert names(box.next_tick().messages) == ["?", "quick", "-quick", *batch[SLICE : 2 * SLICE]]
    assert names(box.next_tick().messages) == batch[2 * SLICE : -1]
    channel.waiting.append([AbortReq(rid=batch[-1])])
    assert names(box.next_tick().messages) == [f"-{batch[-1]}"]


def test_an_abort_of_all_ends_what_is_put_aside_too_and_nothing_that_comes_later() -> None:
    batch = [f"b{i:03}" for i in range(SLICE + 2)]
    box, channel = inbox([req(rid) for rid in batch])
    box.next_tick()
    channel.waiting.append([AbortReq(rid="")])
    channel.waiting.append([req("later")])
    tick = box.next_tick()
    assert (names(tick.messages), ends(tick.ended)) == (["-", "later"], batch[SLICE:])


def test_a_prompt_of_which_all_answers_are_aborted_is_dropped_and_ends_at_once() -> None:
    box, channel = inbox([long_req("a"), long_req("b"), long_req("c", ["c-1", "c-2"]), long_req("d")])
    box.next_tick()
    dropped = weakref.ref(box._parked["b"])
    snapshot = SnapshotReq("c", True, 0.0, id=1)
    channel.waiting.append([AbortReq("b", "gone"), AbortReq("c"), AbortReq("c-2"), AbortReq("c"), snapshot])
    tick = box.next_tick()
    assert (names(tick.messages), ends(tick.ended)) == (["c"], ["b"])
    assert dropped() is None
    [item] = tick.ended[0].items
    assert (item.finish.type, item.finish.message) == (FinishType.ABORT, "gone")
    channel.waiting.append([AbortReq("d")])
    tick = box.next_tick()
    assert (names(tick.messages), ends(tick.ended)) == (["-c", "-c-2", "?"], ["d"])
    # The name can be used again: no abort of its first owner is left.
    channel.waiting.append([req("d")])
    assert box.next_tick() == ([req("d")], [])


def test_a_crowd_that_hangs_up_leaves_nothing_behind() -> None:
    crowd = [f"b{i:05}" for i in range(20_000)]
    box, channel = inbox(*([long_req(rid, [f"{rid}-1"])] for rid in crowd[:10]), [req(rid) for rid in crowd[10:]])
    box.next_tick()
    channel.waiting.append([AbortReq(rid) for rid in crowd[1:]])
    channel.waiting.append([AbortReq(f"{rid}-1") for rid in crowd[1:10]])
    channel.waiting.append([Ping(id=1)])
    tick = box.next_tick()
    assert names(tick.messages) == ["?"]
    assert sorted(ends(tick.ended)) == sorted([*crowd[1:], *(f"{rid}-1" for rid in crowd[1:10])])
    assert not box._aside
    assert not box._parked


def test_long_prompts_take_a_turn_each_and_short_requests_and_pings_overtake_them() -> None:
    box, channel = inbox([long_req(f"b{i}") for i in range(32)])
    ticks = []
    for _ in range(32):
        channel.waiting.append([Ping(id=1), req("quick")])
        ticks.append(names(box.next_tick().messages))
    assert ticks == [["?", "quick", f"b{i}"] for i in range(32)]


def test_long_prompts_of_many_clients_take_a_turn_each_too() -> None:
    box, _channel = inbox(*([long_req(f"b{i}")] for i in range(5)), [Ping(id=1)])
    assert [names(box.next_tick().messages) for _ in range(5)] == [["?", "b0"], ["b1"], ["b2"], ["b3"], ["b4"]]


def test_a_turn_of_short_frames_has_a_limit_of_work() -> None:
    half = "a" * (SLICE_WORK // 2)
    box, _channel = inbox(*([req(f"b{i}", half)] for i in range(5)))
    assert [names(box.next_tick().messages) for _ in range(3)] == [["b0", "b1"], ["b2", "b3"], ["b4"]]


def test_every_kind_of_prompt_counts() -> None:
    many = SLICE_WORK + 1
    long = [
        ChatRendered("c", many),
        TokenizeReq(rid="i", sampling=SamplingParams(seed=1), arrival=0.0, input_ids=[1] * many),
    ]
    for message in long:
        box, _channel = inbox([message], [req("quick")])
        assert box.next_tick().messages[0] == req("quick")


def test_questions_about_text_and_conversations_wait_for_no_turn_and_take_none() -> None:
    chat = Conversation([ChatMessage("user", "a" * (SLICE_WORK + 1))])
    others = [
        EncodeReq(texts=["a" * (SLICE_WORK + 1)], id=1),
        DecodeReq([[1] * (SLICE_WORK + 1)], id=2),
        TokenizeReq(rid="c", sampling=SamplingParams(seed=1), arrival=0.0, chat=chat),
    ]
    box, channel = inbox([long_req("a"), long_req("b")])
    box.next_tick()
    channel.waiting.extend([[other] for other in others])
    channel.waiting.append([req("quick")])
    assert box.next_tick().messages == [*others, req("quick"), long_req("b")]


def test_what_names_an_answer_that_is_set_aside_comes_after_it() -> None:
    box, channel = inbox([long_req("a"), long_req("b", ["b-1", "b-2"])])
    box.next_tick()
    snapshot = SnapshotReq("b-2", True, 0.0, id=1)
    channel.waiting.append([AbortReq(rid="b-1"), snapshot])
    assert names(box.next_tick().messages) == ["b", "-b-1", "?"]
    channel.waiting.append([AbortReq(rid="b-2")])
    assert names(box.next_tick().messages) == ["-b-2"]
