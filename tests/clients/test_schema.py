"""Random requests to any path of the OpenAPI page: no answer is a 5xx, and each conforms to the page.

An instance also refuses what the page forbids. schemathesis draws the requests, in an environment of its own. The model
is tiny, and must be healthy throughout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import python_of, run_client
from support.processes import Pair, pd_pair

CASES = 10_000
"""At instance and router together."""
EXAMPLES = 450
"""Number of examples of each operation. Some operations have few that differ."""
REFUSALS = '[400, 401, 403, 404, 406, 413, 422, 428, "5xx"]'
"""Statuses of a refused body: those that schemathesis knows, and 413, which an enum of a megabyte gets."""

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    args = ["--model-path", folder, "--load-format", "dummy", "--tokenizer-path", "smollm2", "--dtype", "float32"]
    # Even the longest possible answer ends soon.
    args += ["--context-length", "64", "--kv-debug"]
    # Without them, every path of the sessions is a 501.
    args += ["--kv-sessions-dir", str(tmp_path_factory.mktemp("sessions"))]
    with pd_pair(tmp_path_factory.mktemp("pair"), "shm", *map(str, args)) as pair:
        yield pair
        pair.assert_all_returned()


@pytest.mark.parametrize("front", ["instance", "router"])
def test_no_request_gets_a_5xx_or_an_answer_that_is_not_on_the_page(tiny: Pair, tmp_path: Path, front: str) -> None:
    server = tiny.router if front == "router" else tiny.decode
    checks = [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    ]
    if front == "instance":
        # The router writes the fields of hand-overs itself, so it ignores what a client put there.
        checks.append("negative_data_rejection")
    (tmp_path / "schemathesis.toml").write_text(f"[checks.negative_data_rejection]\nexpected-statuses = {REFUSALS}\n")
    said = run_client(
        [
            *(python_of("openai").with_name("schemathesis"), "run", server.url + "/openapi.json", "--mode", "all"),
            # These end the instance, and the pair, as they should.
            *("--exclude-path-regex", "^/(drain|role|release_memory_occupation|kv/resize)$"),
            *("--checks", ",".join(checks), "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)),
            *(
                "--workers",
                "2",
                "--request-timeout",
                "60",
                "--seed",
                "1",
                "--no-color",
                "--generation-database",
                "none",
            ),
        ],
        3000,
        cwd=tmp_path,
    )
    [cases] = re.findall(r"(\d+) generated", said)
    assert int(cases) >= CASES // 2, said[-3000:]
    for one in (tiny.prefill, tiny.decode, tiny.router):
        assert one.is_healthy()
