"""A sample of ``make checkpoint-campaign``, and its own parts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from checkpoints.answers import Texts, Tokens, reference_logits
from checkpoints.bases import make_model
from checkpoints.campaign import all_variants, play, summary, unused_exemptions
from checkpoints.checkpoint import unchanged
from checkpoints.exemptions import EXEMPTIONS, find_exemption
from checkpoints.judge import Outcome, Verdict, difference_of_texts, difference_of_tokens, verdict
from checkpoints.pairs import all_pairs
from checkpoints.variant import Variant

ONE_IN = 13
PLAIN = Variant("llama: as it is", "llama", unchanged)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_sample_is_equal_to_transformers_or_refused_by_name(tmp_path: Path) -> None:
    outcomes = list(play(all_variants()[::ONE_IN], tmp_path))
    assert [outcome for outcome in outcomes if outcome.verdict is Verdict.FAILED] == []
    assert {Verdict.EQUAL, Verdict.REFUSED} <= {outcome.verdict for outcome in outcomes}


def test_there_are_enough_variants_with_names_of_their_own() -> None:
    names = [variant.name for variant in all_variants()]
    assert len(names) == len(set(names)) >= 400
    assert names == [variant.name for variant in all_variants()]


def test_rows_have_every_pair_of_labels() -> None:
    axes = {"a": ["1", "2", "3"], "b": ["1", "2"], "c": ["1", "2", "3", "4"], "d": ["1"]}
    rows = all_pairs(axes, seed=0)
    found = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    wanted = {
        ((one, x), (other, y)) for one, other in itertools.combinations(axes, 2) for x in axes[one] for y in axes[other]
    }
    assert found == wanted
    assert len(rows) < 24


def test_other_tokens_and_other_logits_are_differences() -> None:
    model = make_model("llama")
    chosen = [[1], [2]]
    logits = reference_logits(model, PLAIN.lengths, chosen)
    right = [row.argmax(-1).tolist() for row in logits]
    assert difference_of_tokens(model, PLAIN, Tokens(right, logits)) == ""
    assert "tokens" in difference_of_tokens(model, PLAIN, Tokens([[(right[0][0] + 1) % 97], right[1]], logits))
    shifted = [row + torch.linspace(0, 0.01, row.shape[-1]) for row in logits]
    assert "other logits" in difference_of_tokens(model, PLAIN, Tokens(right, shifted))


@pytest.mark.parametrize(
    ("part", "value"),
    [("ids", [[2]]), ("shown", ["b"]), ("named", {"eos_token": "x"}), ("ends", {2}), ("template", "x")],
)
def test_every_part_of_texts_is_compared(part: str, value: object) -> None:
    texts = Texts([[1]], ["a"], {}, {1})
    assert difference_of_texts(texts, texts) == ""
    assert difference_of_texts(texts, texts._replace(**{part: value})).startswith(part)


def test_a_difference_fails_unless_it_is_exempt_and_so_does_a_missing_refusal() -> None:
    assert verdict(PLAIN, "").verdict is Verdict.EQUAL
    assert verdict(PLAIN, "tokens [1]").verdict is Verdict.FAILED
    assert verdict(PLAIN._replace(refusal="config.json"), "").verdict is Verdict.FAILED
    assert all(find_exemption("no such variant", exemption.differences) is None for exemption in EXEMPTIONS)


def test_the_summary_counts_by_group_and_exemptions_must_be_needed() -> None:
    outcomes = [Outcome(PLAIN, Verdict.EQUAL), Outcome(PLAIN, Verdict.FAILED, "x")]
    assert summary(outcomes).splitlines()[1].split() == ["llama", "2", "1", "0", "0", "1"]
    assert unused_exemptions(outcomes) == [exemption.reason for exemption in EXEMPTIONS]
