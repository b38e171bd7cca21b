"""Answers that begin with reasoning: what is shown, counted and stopped."""

from __future__ import annotations

import itertools

import pytest

from pdserve.detokenizer.request_decoder import ByteDecoders, WindowDecoders
from pdserve.messages.base import pack_i32
from pdserve.messages.outputs import DetokenizeInit, ReasoningReport
from pdserve.messages.sampling import OutputMarks
from pdserve.model_files.text.byte_table import byte_level_table
from pdserve.model_files.text.text_tokenizer import vocabulary_tokens
from tests.unit.detokenizer.test_detokenizer_decoder import BYTE_LEVEL, fast_tokenizer, special_ids, stream
from tests.unit.detokenizer.test_detokenizer_requests import AT_EOS, LENGTH, item, make_detokenizer, make_meta, step

MARKS = OutputMarks(("<eos>",), ("<think>\n", "</think>"))


def begin(*stop: str, prompt: str = "p", marks: OutputMarks | None = MARKS, least: int = 0) -> DetokenizeInit:
    return DetokenizeInit(stop, True, pack_i32(list(prompt.encode())), least, marks)


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize(
    ("prompt", "text", "report"),
    [
        ("p", "<think>\nhm</think>so", ReasoningReport(False, 18)),
        ("p", " \n<think>hm</think>so", ReasoningReport(False, 19)),
        ("<think>\n", "hm</think>so", ReasoningReport(True, 10)),
        ("<think>\n", "hm and no end", ReasoningReport(True, 13)),
        ("p", "so", ReasoningReport(False, 0)),
        ("p", "<thin>so", ReasoningReport(False, 0)),
        ("<think></think>", "so", ReasoningReport(False, 0)),
    ],
)
def test_tokens_of_reasoning_are_counted(
    prompt: str, text: str, report: ReasoningReport, stop: tuple[str, ...], size: int
) -> None:
    detokenizer, outs = make_detokenizer(), []
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for i, piece in enumerate(pieces):
        init = begin(*stop, prompt=prompt) if i == 0 else None
        last = {"finish": LENGTH, "meta": make_meta(len(text))} if i + 1 == len(pieces) else {}
        outs += step(detokenizer, item(piece, init=init, **last))[0]
    assert "".join(out.text for out in outs) == text
    assert outs[-1].reasoning == report
    assert outs[0].reasoning.begins_open == report.begins_open
    known, counts = -1, []
    for out, shown in zip(outs, itertools.accumulate(map(len, pieces)), strict=True):
        counts.append(-1 if out.reasoning is None else out.reasoning.tokens)
        assert counts[-1] != known or out is outs[-1]
        known = counts[-1] if counts[-1] >= 0 else known
        # Without reasoning, tokens count only as long as they may begin it.
        may_begin = "<think>".startswith(text[:shown])
        assert known == (min(shown, report.tokens) if report.tokens else shown * may_begin)
    assert len(detokenizer) == 0


def test_an_answer_without_marks_has_no_report() -> None:
    for stop in ((), ("x",)):
        detokenizer = make_detokenizer()
        [first], _ = step(detokenizer, item("a", init=begin(*stop, marks=None)))
        [last], _ = step(detokenizer, item("b", finish=LENGTH, meta=make_meta(2)))
        assert first.reasoning is last.reasoning is None


def test_stop_strings_count_only_behind_the_reasoning() -> None:
    detokenizer = make_detokenizer()
    [out], stops = step(detokenizer, item("<think>a\n\nb</think>c", init=begin("\n\n")))
    assert (out.text, stops) == ("<think>a\n\nb</think>c", [])
    [out], stops = step(detokenizer, item("d\n\ne", meta=make_meta(24)))
    assert (out.text, out.finish.matched, stops) == ("d", "\n\n", ["r"])
    assert out.reasoning == ReasoningReport(False, 19)


def test_special_tokens_of_a_format_are_shown_and_no_others() -> None:
    detokenizer = make_detokenizer()
    [out], _ = step(detokenizer, item(ids=[97, 256, 98], init=begin()))
    assert out.text == "a<eos>b"
    [out], _ = step(detokenizer, item(ids=[99, 256], finish=AT_EOS, meta=make_meta(5)))
    assert out.text == "c"
    [out], _ = step(detokenizer, item(ids=[97, 256, 98], init=begin(marks=OutputMarks(("<bos>",)))))
    assert out.text == "ab"


@pytest.mark.parametrize("shown", [(), ("<|end|>",), ("<|other|>",)])
def test_both_decoders_show_the_same(shown: tuple[str, ...]) -> None:
    tokenizer = fast_tokenizer(BYTE_LEVEL)
    table = byte_level_table(vocabulary_tokens(BYTE_LEVEL), special_ids(BYTE_LEVEL))
    a, b, c, end = map(BYTE_LEVEL.token_to_id, ("a", "b", "c", "<|end|>"))
    ids = [a, end, b, end, end, c]
    factories = (ByteDecoders(table), WindowDecoders(tokenizer))
    texts = {"".join(stream(Shown(factory, shown), ids, (1, 2))) for factory in factories}
    assert len(texts) == 1
    assert texts.pop().count("<|end|>") == (3 if shown == ("<|end|>",) else 0)


class Shown:
    """A factory with special tokens to show."""

    def __init__(self, factory, shown: tuple[str, ...]) -> None:
        self._factory, self._shown = factory, shown

    def start(self, tail, *, skip_special_tokens: bool):
        return self._factory.start(tail, skip_special_tokens=skip_special_tokens, shown=self._shown)


def test_tables_of_shown_tokens_are_bounded() -> None:
    detokenizer = make_detokenizer()
    for i in range(100):
        step(detokenizer, item("a", rid=str(i), init=begin(marks=OutputMarks((f"<{i}>",)))))
    assert len(detokenizer._factory._with_shown) <= 16
