"""Models with windows, served by the real scheduler on the real engines: every token is transformers' own.

Contexts are many windows long, and the pool of window pages holds a fraction of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import make_reference
from support.model_harness import draw
from support.passes import pool_bytes
from support.served_model import ServedModel

from pdserve.model_runner.kv.page_groups import page_groups

PROMPT, SHARED, GREEDY = 190, 160, 20

pytestmark = pytest.mark.usefixtures("one_thread")
ENGINES = ["torch", "cpu"]
QWEN = {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1}
CASES = {
    "gemma2": {},
    "gemma3": {},
    "olmo3": {},
    "phi3": {},  # all layers have a window
    "mistral": {"sliding_window": 37},
    "qwen2": QWEN,
    "qwen3": QWEN,
    "smollm3": {"use_sliding_window": True, "sliding_window": 19},
}


def greedy(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy continuation of each prompt by transformers."""
    texts = torch.tensor(prompts)
    with torch.inference_mode():
        for _ in range(GREEDY):
            texts = torch.cat((texts, model(texts, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return texts[:, len(prompts[0]) :].tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", CASES)
def test_tokens_are_those_of_transformers(family: str, engine: str, tmp_path: Path) -> None:
    model = make_reference(family, **CASES[family])
    model.save_pretrained(tmp_path)
    first = draw(PROMPT, 3)
    prompts = [first, draw(PROMPT, 5), first[:SHARED] + draw(PROMPT - SHARED, 4)]
    expected = greedy(model, prompts)
    served = ServedModel(tmp_path, attention_backend=engine, swa_full_tokens_ratio=0.3)
    runner = served.runner
    assert runner.engine.attention_backend == engine
    _, window_pool = runner.pools.by_group
    # All three hold far more tokens than that at once.
    assert runner.pools.max_window_tokens < 2 * PROMPT
    pool_bytes(window_pool)[1:].fill_(0xFF)  # NaN that another left there
    for rid, prompt in enumerate(prompts[:2]):
        served.submit(str(rid), prompt, max_new_tokens=GREEDY)
    for _ in range(12):
        served.plan()
        served.work()
    served.submit("2", prompts[2], max_new_tokens=GREEDY)
    served.submit("again", first, max_new_tokens=GREEDY)
    served.run_until_idle()
    assert [served.tokens[rid] for rid in ("0", "1", "2", "again")] == [*expected, expected[0]]
    # Once more, with what is cached of it by now, whole windows or not.
    served.submit("last", prompts[1], max_new_tokens=GREEDY)
    served.run_until_idle()
    assert served.tokens["last"] == expected[1]


def test_who_saves_pages_late_or_rounded_or_never_cuts_a_prompt_keeps_one_group(tmp_path: Path) -> None:
    make_reference("gemma3").save_pretrained(tmp_path)
    tiers = {"enable_hierarchical_cache": True}
    one = (
        tiers | {"hicache_write_policy": "write_back"},
        tiers | {"hicache_host_dtype": "int8"},
        {"chunked_prefill_size": -1},
    )
    for changes, groups in (({"handover": "on"}, 2), (tiers, 2), *((changes, 1) for changes in one)):
        served = ServedModel(tmp_path, **changes)
        runner = served.runner
        assert [group is not None for group in page_groups(runner.pools, runner.device, served.options)] == [
            True
        ] * groups
        assert len(runner.pools.by_group) == groups
        assert len(runner.pools.layout.groups) == groups
