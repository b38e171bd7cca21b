"""Others beside pdserve on the same device, one after the other: torch alone, and transformers' continuous batching.

The load of the latter: prompts of mixed lengths that all come at once, greedy, each with the same number of tokens.
Weights are random. It attends by SDPA and captures no graphs, so it is a weak peer: to be behind it would be a fault.
"""

from __future__ import annotations

import inspect
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .part import Part, run_group
from .peer_steps import compiled_checks, product_checks, prompt_checks
from .record import Check, Finding
from .servers import ask, serve
from .token_checks import CONFIG, Prompts

ANSWER_SECONDS = 120.0


class Load(NamedTuple):
    """``length``: tokens that each of ``prompts`` is answered with. ``warm``: others, as long, for the first round."""

    config: dict[str, Any]
    warm: Prompts
    prompts: Prompts
    length: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens that all answers have together."""
        return len(self.prompts) * self.length


class NotRun(RuntimeError):
    """The peer can't be measured here; the message says why."""


def batching_checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function that measures pdserve, then transformers' continuous batching, then compares both."""
    load = make_load(part.dry_run)
    measured: dict[str, float] = {}
    for name, run in PEERS.items():
        title = f"{name}: {len(load.prompts)} requests"
        yield title, lambda n=name, r=run: measure(part, load, n, r, measured)  # type: ignore[misc]
    yield "pdserve to transformers", lambda: compare(part, measured)


def make_load(dry_run: bool) -> Load:
    """Make a random load of prompts, and a 1B model's config with the vocabulary of the tokenizer at hand."""
    if dry_run:
        sizes, count, longest, length = {"num_hidden_layers": 2}, 3, 20, 6
    else:
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        sizes |= {"num_key_value_heads": 8}
        count, longest, length = 64, 1024, 128
    rng = np.random.default_rng(0)
    lens = rng.integers(longest // 8, longest + 1, count)
    warm, prompts = ([rng.integers(3, CONFIG["vocab_size"], n).tolist() for n in lens] for _ in range(2))
    config = CONFIG | sizes | {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
    return Load(config, warm, prompts, length)


def measure(part: Part, load: Load, name: str, run: Callable[[Part, Load], float], rates: dict[str, float]) -> Finding:
    """Run ``load`` on the engine ``name`` by ``run``, which returns seconds. Put tokens per second into ``rates``.

    The finding says why, if the engine can't be measured here.
    """
    try:
        seconds = run(part, load)
    except NotRun as e:
        return Finding("", f"not run: {e}")
    rates[name] = load.tokens / seconds
    return Finding("", f"{rates[name]:.0f} tokens/s, {seconds:.2f} s")


def compare(part: Part, rates: dict[str, float]) -> Finding:
    """Report how many times as many tokens per second as the peer pdserve generates, if both were measured."""
    if len(rates) < 2:
        return Finding("", "nothing to compare")
    ours, theirs = rates.values()
    text = f"{ours / theirs:.2f} times as many tokens a second"
    return Finding("", text) if part.dry_run else Finding("", text, "at least 1", ours >= theirs)


def time_ours(part: Part, load: Load) -> float:
    """Run ``load`` on a pdserve server, after a first round.

    Return the seconds from the request to the whole answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6}
        llama |= {"hidden_act": "silu", "torch_dtype": "bfloat16"}
        Path(folder, "config.json").write_text(json.dumps(load.config | llama))
        args = ["--model-path", folder, "--load-format", "dummy", *part.server_tokenizer]
        args += ["--device", part.device.type, "--dtype", "float32" if part.dry_run else "bfloat16"]
        args += ["--max-total-tokens", "2048"] if part.dry_run else ["--attention-backend", "triton"]
        with serve(args, part.log("peers")) as address:
            _ours(address, load.warm, load.length)
            begin = time.perf_counter()
            answers = _ours(address, load.prompts, load.length)
            seconds = time.perf_counter() - begin
    _check_whole([answer["output_ids"] for answer in answers], load)
    return seconds


def _ours(address: str, prompts: Prompts, length: int) -> Any:
    sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    return ask(f"{address}/generate", {"input_ids": prompts, "sampling_params": sampling}, ANSWER_SECONDS)


def time_transformers(part: Part, load: Load) -> float:
    """Run ``load`` by transformers' ``generate_batch``, after a first round. Return the seconds until the last answer.

    Its manager has been started before. Raises ``NotRun`` if this version can't be measured so.
    """
    import transformers

    dtype = torch.float32 if part.dry_run else torch.bfloat16
    model_class = transformers.LlamaForCausalLM
    taken = inspect.signature(getattr(model_class, "generate_batch", _none)).parameters
    if "persistent_manager" not in taken:
        version = transformers.__version__
        raise NotRun(f"transformers {version} has no generate_batch whose start can be told from its work")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    options = {"persistent_manager": True, "progress_bar": False}
    if part.dry_run:
        # Else it takes as much memory as there is, which on a CPU is the host's.
        small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=128)
        options["continuous_batching_config"] = small
    with torch.device(part.device):
        model = model_class(transformers.LlamaConfig(**load.config)).to(dtype).eval()
    generation = transformers.GenerationConfig(
        max_new_tokens=load.length, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    try:
        _checked(model.generate_batch(load.warm, generation_config=generation, **options), load)
        begin = time.perf_counter()
        answers = _checked(model.generate_batch(load.prompts, generation_config=generation, **options), load)
        # When the last answer was whole: until its manager has paused it may take a second more.
        seconds: float = max(answer.lifespan[1] for answer in answers.values()) - begin
    finally:
        model.destroy_cached_continuous_batching_manager()
    return seconds


def _checked(answers: dict[str, Any], load: Load) -> dict[str, Any]:
    if failed := [answer.error for answer in answers.values() if answer.error]:
        raise NotRun(f"it failed: {failed[0]}")
    _check_whole([answer.generated_tokens for answer in answers.values()], load)
    return answers


def _none() -> None:
    """Do nothing. Stands in for a method that a version of transformers lacks."""


def _check_whole(answers: list[list[int]], load: Load) -> None:
    found = [len(answer) for answer in answers]
    if found != [load.length] * len(load.prompts):
        raise ValueError(f"answers of {sorted(set(found))} tokens, {len(found)} of them: not what was asked for")


PEERS = {"pdserve": time_ours, "transformers' continuous batching": time_transformers}
GROUPS = {
    "products": product_checks,
    "prompts": prompt_checks,
    "compiled": compiled_checks,
    "batching": batching_checks,
}


if __name__ == "__main__":
    run_group("peers", GROUPS)
