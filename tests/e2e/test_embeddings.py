"""Embeddings and scores are transformers' own: by one instance, and by a pair's prefill through a router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.families import make_reference
from support.model_harness import draw
from support.processes import Launched, Pair, pd_pair

CASES = [("llama", "mean"), ("qwen3", "last"), ("gemma2", "mean"), ("mistral", "last"), ("deepseek-v3", "mean")]
PROMPTS = [draw(length, length) for length in (1, 7, 40, 90)]
LABELS = [5, 90, 0]
CHUNK = "16"

pytestmark = pytest.mark.timeout(300)


class Served(NamedTuple):
    """A pair, and what it serves."""

    pair: Pair
    model: torch.nn.Module
    pooling: str

    @property
    def servers(self) -> list[Launched]:
        """The router, which sends such requests to the prefill, and an instance that answers alone."""
        return [self.pair.router, self.pair.decode]


@pytest.fixture(
    scope="module",
    # Each starts a pair, and one is fast. tests/unit/model_runner/test_readouts.py has the others' passes, and what is
    # cached of means.
    params=[pytest.param(case, id="-".join(case), marks=[pytest.mark.slow] * (i != 1)) for i, case in enumerate(CASES)],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, pooling = request.param
    tmp = tmp_path_factory.mktemp(family)
    model = make_reference(family)
    model.save_pretrained(tmp / "model")
    args = ["--model-path", str(tmp / "model"), "--tokenizer-path", "smollm2", "--dtype", "float32"]
    args += ["--pooling", pooling, "--chunked-prefill-size", CHUNK, "--max-total-tokens", "4096"]
    with pd_pair(tmp, "tcp", *args) as pair:
        yield Served(pair, model, pooling)
        pair.assert_all_returned()


def answered(server: Launched, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def test_embeddings_are_those_of_transformers(served: Served) -> None:
    for server in served.servers:
        for _ in range(2):  # the second time with what is cached
            answer = answered(server, "/v1/embeddings", {"input": PROMPTS})
            for tokens, entry in zip(PROMPTS, answer["data"], strict=True):
                with torch.inference_mode():
                    states = served.model.base_model(torch.tensor([tokens])).last_hidden_state[0].double().numpy()
                vector = states.mean(0) if served.pooling == "mean" else states[-1]
                np.testing.assert_allclose(entry["embedding"], vector / np.linalg.norm(vector), atol=1e-5, rtol=0)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached == 0) == (served.pooling == "mean")
    assert served.pair.decode.info()["disaggregation"]["received"]["rooms"] == 0


def test_labels_have_their_probabilities(served: Served) -> None:
    body = {"query": PROMPTS[1], "items": PROMPTS[2:], "label_token_ids": LABELS}
    for server in served.servers:
        answer = answered(server, "/v1/score", body)
        for item, scores in zip(PROMPTS[2:], answer["scores"], strict=True):
            with torch.inference_mode():
                logits = served.model(torch.tensor([PROMPTS[1] + item])).logits[0, -1]
            np.testing.assert_allclose(scores, logits.softmax(-1)[LABELS].numpy(), atol=1e-5, rtol=1e-3)
