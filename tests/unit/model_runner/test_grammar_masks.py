"""Masks of rows with a grammar: what may follow, what is put back, and that a matcher is a function of the output."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from pdserve.messages.base import pack_i32
from pdserve.messages.grammar import ForgetGrammar, Grammar, PrepareGrammar
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.worker import RowInit
from pdserve.model_files.errors import UnsupportedModel
from pdserve.model_files.options import ModelOptions
from pdserve.model_files.text.load import load_tokenizer
from pdserve.model_runner.grammar.matchers import Matchers
from pdserve.model_runner.grammar.preparation import GrammarPreparation
from pdserve.model_runner.sampling.choose_tokens import choose_tokens
from pdserve.model_runner.sampling.rows import RowStates, host_rows
from pdserve.model_runner.sampling.rules import TorchRules

VOCAB = 49160
"""More than the tokenizer has: models pad their vocabularies."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPTIONS = ModelOptions(model_path="smollm2")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(OPTIONS)


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    return Matchers(OPTIONS, VOCAB)


def sampling(grammar: Grammar | None, **fields) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "temperature": 1.0} | fields), grammar=grammar)


class Rows:
    """Rows that get random logits, the same for equal seeds and positions."""

    def __init__(self, matchers: Matchers, eos: int, count: int = 1) -> None:
        self.states: RowStates = host_rows(count, VOCAB, matchers)
        self.eos = eos

    def start(self, row: int, params: SamplingParams, output: list[int]) -> None:
        packed = pack_i32(np.array(output, np.int32))
        # Only the logits of rows with log-probabilities are put back.
        self.states.start(RowInit(row, 3, params, stop_ids=(self.eos,), logprobs=0, output=packed))

    def step(self, rows: list[int], positions: list[int]) -> list[int]:
        """Sample one token for each of ``rows``; check that the logits are left as they were."""
        chosen = np.array(rows)
        logits = np.stack([self.logits(row, at) for row, at in zip(rows, positions, strict=True)])
        before = logits.copy()
        params = self.states.params(chosen)
        sampled = choose_tokens(logits, self.states, chosen, params, np.array(positions), TorchRules())
        assert (logits == before).all()
        assert sampled.finite.all()
        self.states.grammars.accept(chosen, params, sampled.tokens)
        return sampled.tokens.tolist()

    @staticmethod
    def logits(row: int, position: int) -> np.ndarray:
        return np.random.default_rng([row, position]).normal(0, 3, VOCAB).astype(np.float32)

    def run(self, row: int, most: int = 80, output: tuple[int, ...] = ()) -> list[int]:
        """Sample until the row ends; return its output without the end."""
        tokens = list(output)
        while len(tokens) < most and (token := self.step([row], [3 + len(tokens)])[0]) != self.eos:
            tokens.append(token)
        return tokens


def person(schema: dict = PERSON) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def test_random_logits_give_json_of_the_schema(matchers, tokenizer):
    rows = Rows(matchers, tokenizer.eos_ids[0], 8)
    for row in range(8):
        rows.start(row, sampling(person()), [])
        text = tokenizer.decode(rows.run(row, most=400), skip_special_tokens=False)
        made = json.loads(text)
        assert made.keys() == {"name", "age"}
        assert isinstance(made["age"], int)


def test_a_row_that_starts_again_goes_on_as_if_it_had_not(matchers, tokenizer):
    rows = Rows(matchers, tokenizer.eos_ids[0])
    rows.start(0, sampling(person()), [])
    whole = rows.run(0, most=400)
    for kept in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        rows.start(0, sampling(person()), whole[:kept])
        assert rows.run(0, most=400, output=tuple(whole[:kept])) == whole


def test_rows_beside_each_other_do_not_change_each_other(matchers, tokenizer):
    rows = Rows(matchers, tokenizer.eos_ids[0], 3)
    alone = {}
    grammars = {0: person(), 1: None, 2: Grammar("regex", "[a-f]{40}")}
    for row, grammar in grammars.items():
        rows.start(row, sampling(grammar), [])
        alone[row] = [rows.step([row], [3 + i])[0] for i in range(8)]
    for row, grammar in grammars.items():
        rows.start(row, sampling(grammar), [])
    together = [rows.step([2, 0, 1], [3 + i] * 3) for i in range(8)]
    assert [[step[at] for step in together] for at in (1, 2, 0)] == [alone[0], alone[1], alone[2]]


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar("choice", '["red", "green blue"]'), {"red", "green blue"}),
        (Grammar("ebnf", 'root ::= "yes" | "no"'), {"yes", "no"}),
        (Grammar("lark", 'start: "a" "b"?'), {"a", "ab"}),
        (Grammar("regex", "x{3}/y"), {"xxx/y"}),
        (Grammar("json_schema", '{"const": "<|im_end|>"}'), {'"<|im_end|>"'}),
    ],
)
def test_each_kind_of_grammar_allows_its_texts_alone(grammar: Grammar, texts: set[str], matchers, tokenizer):
    rows = Rows(matchers, tokenizer.eos_ids[0], 6)
    for row in range(6):
        rows.start(row, sampling(grammar), [])
        assert tokenizer.decode(rows.run(row), skip_special_tokens=False).strip() in texts


def test_a_ban_on_the_end_gives_way_where_only_the_end_is_allowed(matchers, tokenizer):
    rows = Rows(matchers, tokenizer.eos_ids[0])
    rows.start(0, sampling(Grammar("regex", "ab"), min_new_tokens=20), [])
    assert tokenizer.decode(rows.run(0), skip_special_tokens=False) == "ab"


def test_a_bias_cannot_break_the_grammar(matchers, tokenizer):
    rows = Rows(matchers, tokenizer.eos_ids[0])
    (forbidden,) = tokenizer.encode_batch(["z"], add_special_tokens=False)[0]
    rows.start(0, sampling(Grammar("regex", "[ab]{5}"), logit_bias={forbidden: 100.0}), [])
    assert set(tokenizer.decode(rows.run(0), skip_special_tokens=False)) <= {"a", "b"}


@pytest.mark.parametrize("is_open", [False, True])
def test_the_grammar_begins_after_the_reasoning(is_open: bool, matchers, tokenizer):
    thought = "Three is odd.</think>\n\n" if is_open else "<think>\nThree is odd.</think>\n\n"
    begun = tokenizer.encode_batch([thought], add_special_tokens=False)[0]
    grammar = Grammar("regex", "[0-9]{3}", reasoning=("<think>", "</think>"), is_reasoning_open=is_open)
    rows = Rows(matchers, tokenizer.eos_ids[0])
    rows.start(0, sampling(grammar), begun)
    text = tokenizer.decode(rows.run(0, output=tuple(begun)), skip_special_tokens=False)
    assert text.removeprefix(thought).strip().isdigit()


def test_an_answer_may_do_without_reasoning_unless_it_is_open(matchers, tokenizer):
    (digits,) = tokenizer.encode_batch(["123"], add_special_tokens=False)
    for is_open in (False, True):
        grammar = Grammar("regex", "[0-9]{3}", reasoning=("<think>", "</think>"), is_reasoning_open=is_open)
        matcher = matchers.make(grammar, np.array(digits, np.int32))
        allowed = matcher.penalties() == 0
        assert bool(allowed[tokenizer.eos_ids[0]]) is not is_open


def test_output_that_breaks_the_grammar_leaves_no_token(matchers, tokenizer):
    (letters,) = tokenizer.encode_batch(["xyz"], add_special_tokens=False)
    assert matchers.make(Grammar("regex", "[0-9]+"), np.array(letters, np.int32)).penalties().max() != 0


def test_a_grammar_that_cannot_be_compiled_leaves_no_token(matchers):
    assert matchers.make(Grammar("regex", "(a"), np.array([], np.int32)).penalties().max() != 0
    assert matchers.make(Grammar("json_schema", "{"), np.array([], np.int32)).penalties().max() != 0


def test_a_tokenizer_that_cannot_be_used_ends_its_requests_alone(monkeypatch):
    def load():
        raise UnsupportedModel("no bytes")

    matchers = Matchers(OPTIONS, VOCAB)
    monkeypatch.setattr(matchers, "_load_tokenizer", load)
    matcher = matchers.make(Grammar("regex", "a+"), np.array([], np.int32))
    matchers.advance([(matcher, 0)])
    assert matcher.penalties().max() == -np.inf


def test_a_vocabulary_smaller_than_the_tokenizers_has_its_tokens_alone(tokenizer):
    matcher = Matchers(OPTIONS, 600).make(Grammar("regex", "(good|morning)+"), np.array([], np.int32))
    allowed = np.flatnonzero(matcher.penalties() == 0).tolist()
    assert {tokenizer.decode([token], skip_special_tokens=False) for token in allowed} >= {"g", "m"}


def test_matchers_of_one_grammar_are_compiled_once(matchers, monkeypatch):
    grammar = Grammar("regex", "only once")
    matchers.make(grammar, np.array([], np.int32))
    monkeypatch.setattr(matchers, "_load_tokenizer", lambda: pytest.fail("compiled again"))
    matchers.make(grammar, np.array([], np.int32))


def test_a_compiled_grammar_is_kept_until_it_is_to_be_forgotten(matchers, monkeypatch):
    told = []
    preparation = GrammarPreparation(matchers, lambda: SimpleNamespace(send=told.append))
    grammars = [Grammar("regex", f"kept {i}") for i in range(70)]
    for number, grammar in enumerate(grammars):
        preparation.obey(PrepareGrammar(number, grammar))
    matchers.compile(grammars[-1])
    with monkeypatch.context() as patch:
        patch.setattr(matchers, "_load_tokenizer", lambda: pytest.fail("compiled again"))
        for grammar in grammars:
            matchers.make(grammar, np.array([], np.int32))
    for number in range(70):
        preparation.obey(ForgetGrammar(number))
    assert not matchers._compiled.keys() & set(grammars)
    matchers._compiler.submit(int).result()
    assert [message.number for message in told] == list(range(70))


def test_a_larger_grammar_counts_for_more_memory(matchers):
    sizes = []
    for count in (1, 1000):
        schema = {"properties": {f"p{i}": {"type": "string", "pattern": f"^a{{{i}}}$"} for i in range(count)}}
        matchers.prepare(Grammar("json_schema", json.dumps(schema)), sizes.append)
    matchers._compiler.submit(int).result()
    assert sizes[0] < 1 << 18
    assert 1 << 22 < sizes[1] < 1 << 26


def test_the_padding_of_the_vocabulary_is_never_allowed(matchers):
    matcher = matchers.make(Grammar("regex", "(?s:.*)"), np.array([], np.int32))
    allowed = matcher.penalties() == 0
    assert allowed[:49000].sum() > 40000
    assert not allowed[49152:].any()
