"""What the tokenizer process takes next: long frames in slices, short ones in between, aborts behind their requests."""

from __future__ import annotations

from collections import deque
from typing import Any

from pdserve.messages.control import Ping
from pdserve.messages.requests import AbortReq, TokenizeReq
from pdserve.messages.sampling import SamplingParams
from pdserve.server.tokenizer_inbox import MAX_BATCH, SLICE, TokenizerInbox


class Frames:
    """A channel with frames that wait. Waiting for more than there are would be for ever."""

    def __init__(self) -> None:
        self.waiting: deque[list[Any]] = deque()

    def recv(self, timeout: int) -> list[Any]:
        assert self.waiting or timeout == 0, "would wait for ever"
        return self.waiting.popleft() if self.waiting else []


def req(rid: str) -> TokenizeReq:
    return TokenizeReq(rid=rid, sampling=SamplingParams(seed=1), arrival=0.0, text="a")


def names(messages: list[Any]) -> list[str]:
    return [m.rid if isinstance(m, TokenizeReq) else f"-{m.rid}" if isinstance(m, AbortReq) else "?" for m in messages]


def inbox(*frames: list[Any]) -> tuple[TokenizerInbox, Frames]:
    channel = Frames()
    channel.waiting.extend(frames)
    return TokenizerInbox(channel), channel  # type: ignore[arg-type]


def test_short_frames_are_taken_together_up_to_a_limit() -> None:
    box, channel = inbox(*([req(str(i))] for i in range(MAX_BATCH + 3)))
    assert len(box.next_turn()) == MAX_BATCH
    assert names(box.next_turn()) == [str(MAX_BATCH + i) for i in range(3)]
    assert not channel.waiting


def test_what_comes_during_a_long_frame_overtakes_it_but_aborts() -> None:
    batch = [f"b{i}" for i in range(2 * SLICE + 5)]
    box, channel = inbox([req(rid) for rid in batch])
    assert names(box.next_turn()) == batch[:SLICE]
    channel.waiting.append([Ping(id=1), req("quick")])
    channel.waiting.append([AbortReq(rid=batch[-1]), AbortReq(rid="quick")])
    # "quick" was passed on before its abort, which need not wait.
    assert names(box.next_turn()) == ["?", "quick", "-quick", *batch[SLICE : 2 * SLICE]]
    assert names(box.next_turn()) == [*batch[2 * SLICE :], f"-{batch[-1]}"]
    channel.waiting.append([AbortReq(rid=batch[-1])])
    assert names(box.next_turn()) == [f"-{batch[-1]}"]


def test_an_abort_of_all_ends_what_is_put_aside_too_and_nothing_that_comes_later() -> None:
    batch = [f"b{i:03}" for i in range(SLICE + 2)]
    box, channel = inbox([req(rid) for rid in batch])
    box.next_turn()
    channel.waiting.append([AbortReq(rid="")])
    channel.waiting.append([req("later")])
    assert names(box.next_turn()) == ["-", "later", *batch[SLICE:], *(f"-{rid}" for rid in batch[SLICE:])]
