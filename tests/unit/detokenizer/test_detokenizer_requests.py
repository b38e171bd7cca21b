"""The life of requests in the detokenizer: start, stop strings, finish, errors, late tokens, rids used again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.detokenizer.detokenizer import Detokenizer
from pdserve.detokenizer.process import route
from pdserve.detokenizer.request_decoder import ByteDecoders, CleaningDecoders
from pdserve.messages.base import pack_i32
from pdserve.messages.control import Pong
from pdserve.messages.outputs import (
    DetokenizeInit,
    FinishReason,
    FinishType,
    PromptReport,
    ReqError,
    ReqMeta,
    ReqTokens,
    TextBatch,
    Timing,
    TokenBatch,
    TokenLogprob,
)
from pdserve.messages.requests import StopReq
from pdserve.model_files.text.byte_table import ByteTable

EOS = 256
LENGTH = FinishReason(FinishType.LENGTH)
ABORT = FinishReason(FinishType.ABORT, message="aborted by the client")
AT_EOS = FinishReason(FinishType.STOP, EOS)


def make_detokenizer():
    """Make a detokenizer with bytes as token ids, and a special EOS."""
    return Detokenizer(ByteDecoders(ByteTable([*(bytes([b]) for b in range(256)), b"<eos>"], frozenset({EOS}), False)))


def make_init(*stop, skip=True):
    return DetokenizeInit(stop=stop, skip_special_tokens=skip, prompt_tail=pack_i32([ord("p")]))


def make_meta(completion_tokens):
    return ReqMeta(prompt_tokens=3, completion_tokens=completion_tokens, cached_tokens=0, timing=Timing())


def tokens(text):
    return list(text.encode())


def item(text="", *, rid="r", ids=None, **fields):
    return ReqTokens(rid, tokens(text) if ids is None else ids, **fields)


def step(detokenizer, *items):
    """Process one step, and return its texts and the rids to stop."""
    result = detokenizer.process(TokenBatch(items=list(items)))
    return result.batch.items, [s.rid for s in result.stops]


def test_plain_request_streams_and_leaves_nothing_behind():
    d = make_detokenizer()
    assert step(d, item("a", init=make_init()))[0][0].text == "a"
    [out], stops = step(d, item("bc", finish=LENGTH, meta=make_meta(3)))
    assert (out.text, out.token_ids, out.finish, stops) == ("bc", tokens("bc"), LENGTH, [])
    assert out.meta.completion_tokens == 3
    assert 0 < out.meta.timing.detokenize_ms < 1000
    assert len(d) == 0


def make_cleaning_detokenizer():
    """Make a detokenizer that keeps spaces back until what follows them is known."""
    return Detokenizer(CleaningDecoders(ByteDecoders(ByteTable([bytes([b]) for b in range(256)], frozenset(), False))))


@pytest.mark.parametrize("init", [make_init(), make_init("nothing")])
def test_text_that_the_decoder_kept_back_comes_with_the_finish(init):
    d = make_cleaning_detokenizer()
    assert step(d, item("a ", init=init, meta=make_meta(2)))[0][0].text == "a"
    [out], _ = step(d, item(" 's", finish=LENGTH, meta=make_meta(5)))
    assert (out.text, out.finish) == (" 's", LENGTH)


def test_text_that_comes_with_the_finish_may_complete_a_stop_string():
    d = make_cleaning_detokenizer()
    [out], stops = step(d, item("ab n", init=make_init("b n"), finish=LENGTH, meta=make_meta(4)))
    assert (out.text, out.finish, stops) == ("a", FinishReason(FinishType.STOP, "b n"), [])
    assert len(d) == 0


def test_a_stop_string_may_not_be_completed_by_the_finish_before_its_time():
    d = make_cleaning_detokenizer()
    init = make_init("b n")
    init.min_tokens = 9
    [out], _ = step(d, item("ab n", init=init, finish=LENGTH, meta=make_meta(4)))
    assert (out.text, out.finish) == ("ab n", LENGTH)


def test_the_text_of_a_prompt_is_whole():
    report = PromptReport(pack_i32(tokens("it 's n")), None)
    [out], _ = step(make_cleaning_detokenizer(), item("", init=make_init(), prompt=report, meta=make_meta(0)))
    assert out.prompt.text == "it's n"


def test_requests_of_a_step_keep_their_order_and_their_own_state():
    d = make_detokenizer()
    emoji = tokens("😀")
    texts, _ = step(d, item(ids=emoji[:2], rid="x", init=make_init()), item("hi", rid="y", init=make_init()))
    assert [(t.rid, t.text, t.token_ids) for t in texts] == [("x", "", emoji[:2]), ("y", "hi", tokens("hi"))]
    texts, _ = step(d, item("!", rid="y"), item(ids=emoji[2:], rid="x"))
    assert [(t.rid, t.text) for t in texts] == [("y", "!"), ("x", "😀")]


def test_an_incomplete_character_at_the_end_is_dropped():
    d = make_detokenizer()
    [out], _ = step(d, item(ids=[ord("a"), 0xE4], init=make_init(), finish=LENGTH, meta=make_meta(2)))
    assert (out.text, out.token_ids) == ("a", [ord("a"), 0xE4])


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_token_is_counted_but_not_shown(skip):
    d = make_detokenizer()
    [out], _ = step(d, item(ids=[ord("a"), EOS], init=make_init(skip=skip), finish=AT_EOS, meta=make_meta(2)))
    assert (out.text, out.token_ids, out.meta.completion_tokens) == ("a", [ord("a"), EOS], 2)


def test_special_tokens_within_the_text_are_shown_on_request():
    d = make_detokenizer()
    assert step(d, item(ids=[EOS], init=make_init(skip=False)))[0][0].text == "<eos>"
    assert step(d, item(ids=[EOS], init=make_init()))[0][0].text == ""


def test_a_stop_string_cuts_text_tokens_and_logprobs():
    d = make_detokenizer()
    logprobs = [TokenLogprob(i, -1.0) for i in tokens("xENDyz")]
    [out], _ = step(d, item("aE", init=make_init("END"), meta=make_meta(2)))
    assert (out.text, out.token_ids, out.meta.prompt_tokens) == ("a", tokens("aE"), 3)  # a stream's counts
    [out], _ = step(d, item("", meta=make_meta(2)))
    assert out.meta is None  # only there in case a stop string ends the request
    [out], stops = step(d, item("xENDyz", meta=make_meta(8), logprobs=logprobs))
    assert stops == ["r"]
    assert (out.text, out.token_ids) == ("Ex", tokens("xEND"))
    assert out.finish == FinishReason(FinishType.STOP, "END")
    assert out.meta.completion_tokens == 6
    assert [(entry.token_id, entry.data, entry.chars) for entry in out.logprobs] == [
        (b, bytes([b]), 1) for b in tokens("xEND")
    ]
    assert len(d) == 0


def stops_at(text, stop, min_tokens, size=1):
    """Return the output, and how many of its tokens it took. Items have ``size`` tokens."""
    d, shown, count = make_detokenizer(), "", 0
    init = make_init(stop)
    init.min_tokens = min_tokens
    for i in range(0, len(text), size):
        [out], _ = step(d, item(text[i : i + size], init=init if i == 0 else None, meta=make_meta(0)))
        shown, count = shown + out.text, count + len(out.token_ids)
        if out.finish is not None:
            assert out.finish == FinishReason(FinishType.STOP, stop)
            return shown, count
    [out], _ = step(d, item(finish=LENGTH, meta=make_meta(0)))
    return shown + out.text, count


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "shown", "tokens"),
    [
        ("abcdefgh", "c", 2, "ab", 3),  # its last token is the one behind the minimum
        ("abcdefgh", "c", 3, "abcdefgh", 8),  # it is complete with the last token of the minimum
        ("abcdefgh", "c", 6, "abcdefgh", 8),
        ("abcabc", "c", 3, "abcab", 6),
        ("abcdefgh", "cdef", 4, "ab", 6),  # begun within the minimum, complete after it
        ("aaaaaa", "aa", 3, "aa", 4),  # one match may overlap the one that was passed over
        ("abcab", "abcabd", 2, "abcab", 5),  # held back until the end
    ],
)
def test_a_stop_string_ends_nothing_before_min_tokens(text, stop, min_tokens, shown, tokens, size):
    assert stops_at(text, stop, min_tokens, size) == (shown, tokens)


def test_min_tokens_of_a_moved_request_count_from_its_first_token():
    # The instance that goes on with it tells its detokenizer all tokens so far at once.
    assert stops_at("abcabcabc", "c", 5, size=5) == ("abcab", 6)


def test_text_held_back_for_a_stop_string_comes_with_the_finish():
    d = make_detokenizer()
    assert step(d, item("abEN", init=make_init("END"), meta=make_meta(4)))[0][0].text == "ab"
    [out], stops = step(d, item(ids=[EOS], finish=AT_EOS, meta=make_meta(5)))
    assert (out.text, out.finish, stops) == ("EN", AT_EOS, [])


def test_a_stop_string_completed_by_the_last_token_needs_no_stop_request():
    d = make_detokenizer()
    # The scheduler has ended the request by itself: a StopReq could only hit another request with this rid.
    [out], stops = step(d, item("abEND", init=make_init("END"), finish=LENGTH, meta=make_meta(5)))
    assert (out.text, out.finish.matched, out.meta.completion_tokens, stops) == ("ab", "END", 5, [])


@pytest.mark.parametrize(
    "late",
    [
        item("zz", meta=make_meta(5)),
        item("z", finish=LENGTH, meta=make_meta(5)),
        item(finish=ABORT, meta=make_meta(5)),
    ],
)
def test_what_comes_late_for_a_stopped_request_is_dropped(late):
    d = make_detokenizer()
    step(d, item("abEND", init=make_init("END"), meta=make_meta(5)))
    assert step(d, late) == ([], [])
    assert len(d) == 0


def test_a_rid_can_be_used_again_after_a_stop_string():
    d = make_detokenizer()
    step(d, item("END", init=make_init("END"), meta=make_meta(3)))
    assert step(d, item("new", init=make_init("END"), meta=make_meta(3)))[0][0].text == "new"
    step(d, item("END", meta=make_meta(6)))
    [out], _ = step(d, item(finish=ABORT, meta=make_meta(0)))  # its third life ends before it begins
    assert out.finish == ABORT


@pytest.mark.parametrize("meta", [None, make_meta(0)])
def test_a_request_aborted_before_its_first_token_is_answered(meta):
    [out], _ = step(make_detokenizer(), item(finish=ABORT, meta=meta))
    assert (out.rid, out.text, out.token_ids, out.finish) == ("r", "", [], ABORT)


def test_an_abort_flushes_what_was_held_back():
    d = make_detokenizer()
    step(d, item("aEN", init=make_init("END"), meta=make_meta(3)))
    [out], _ = step(d, item(finish=ABORT, meta=make_meta(3)))
    assert (out.text, out.finish, len(d)) == ("EN", ABORT, 0)


def test_errors_and_answers_pass_in_order_and_an_error_ends_the_request():
    d = make_detokenizer()
    error, pong = ReqError(rid="r", status=503, message="the peer is gone"), Pong(id=7, ready=True)
    batch = TokenBatch(items=[item("aEN", init=make_init("END"), meta=make_meta(3))])
    routed = route(d, [pong, batch, error])
    assert routed.to_http[0] is pong
    assert isinstance(routed.to_http[1], TextBatch)
    assert routed.to_http[2] is error
    assert len(d) == 0


def test_a_step_of_late_tokens_sends_nothing_to_http():
    d = make_detokenizer()
    first = TokenBatch(items=[item("END", init=make_init("END"), meta=make_meta(3))])
    assert route(d, [first]).to_scheduler == [StopReq(rid="r")]
    assert route(d, [TokenBatch(items=[item("x", meta=make_meta(4))])]) == ([], [])


@given(
    text=st.text(alphabet="ab😀", max_size=20),
    stop=st.lists(st.text(alphabet="ab😀", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_stream_with_stop_strings_is_the_whole_text_cut(text, stop, sizes):
    """However tokens arrive, text and tokens end where the stop string that completes first does."""
    d, ids = make_detokenizer(), tokens(text)
    chunks, i = [], 0
    while i < len(ids):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(ids[i : i + size])
        i += size
    shown, released, finish, sent = "", [], None, 0
    for n, chunk in enumerate([*chunks, []]):
        sent += len(chunk)
        last = n == len(chunks)
        init = make_init(*stop) if n == 0 else None
        texts, _ = step(d, item(ids=chunk, init=init, meta=make_meta(sent), finish=LENGTH if last else None))
        for out in texts:
            assert finish is None  # nothing after the end
            shown, released, finish = shown + out.text, released + out.token_ids, out.finish
            if finish is not None:
                assert out.meta.completion_tokens == len(released)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert (shown, released, finish) == (text, ids, LENGTH)
        return
    matched = max((s for s in stop if text[: min(ends)].endswith(s)), key=len)
    assert finish == FinishReason(FinishType.STOP, matched)
    assert shown == text[: min(ends) - len(matched)]
    assert released == tokens(text[: min(ends)])
    assert len(d) == 0


def test_logprobs_say_what_their_tokens_read():
    d = make_detokenizer()
    ids = [ord("a"), *"é".encode(), EOS]
    logprobs = [TokenLogprob(i, -1.0, [(ord("b"), -0.5), (EOS, -2.0), (999, -3.0)]) for i in ids]
    [out], _ = step(d, item(ids=ids, init=make_init(), logprobs=logprobs, finish=AT_EOS, meta=make_meta(4)))
    assert out.text == "aé"
    assert [(entry.data, entry.chars) for entry in out.logprobs] == [
        (b"a", 1),
        (b"\xc3", 0),
        (b"\xa9", 1),
        (b"<eos>", 0),
    ]
    assert out.logprobs[0].top == [(ord("b"), -0.5, b"b"), (EOS, -2.0, b"<eos>"), (999, -3.0, b"")]


def test_the_prompt_is_sent_once_and_reads_like_a_text():
    d = make_detokenizer()
    ids = [EOS, *tokens("né")]
    scored = [TokenLogprob(i, -1.0) for i in ids[2:]]
    [out], _ = step(d, item("a", init=make_init(), prompt=PromptReport(pack_i32(ids), scored)))
    assert (out.prompt.text, out.prompt.token_ids) == ("né", ids)
    assert [(entry.data, entry.chars) for entry in out.prompt.logprobs] == [(b"\xc3", 0), (b"\xa9", 1)]
    [out], _ = step(d, item("b", finish=LENGTH, meta=make_meta(2)))
    assert out.prompt is None


def test_prompt_logprobs_alone_bring_no_prompt():
    report = PromptReport(b"", [TokenLogprob(ord("x"), None)])
    [out], _ = step(make_detokenizer(), item("a", init=make_init(), prompt=report))
    assert (out.prompt.text, out.prompt.token_ids, out.prompt.logprobs[0].data) == ("", [], b"x")
