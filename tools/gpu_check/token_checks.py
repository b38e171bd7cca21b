"""What servers of the check are held against: tokens that transformers generates, of a random model in float32."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .part import Part
from .record import Finding
from .servers import ask, generate, serve

Prompts = list[list[int]]
Tokens = list[list[int]]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIG = SIZES | {"num_key_value_heads": 2, "vocab_size": 49152, "head_dim": 64, "max_position_embeddings": 2048}
OPTIONS = ["--max-total-tokens", "8192"]
LENGTH = 24
SAME = "the same tokens"


PROMPTS = (5, 40, 300, 17, 64, 100, 1, 2, 15, 16, 31, 33, 63, 65, 127, 128, 129, 200, 511, 7)
"""Tokens of each prompt: around the sizes of pages and tiles."""


class Asked(NamedTuple):
    """``options``: of any server. ``folder``: of models. ``reference``: what ``model`` says to each of ``prompts``."""

    part: Part
    folder: Path
    options: list[str]
    model: Any
    prompts: Prompts
    reference: Tokens

    @property
    def common(self) -> list[str]:
        """Command line options of every server of this model."""
        return ["--model-path", str(self.folder / "model"), *self.options]

    def on(self, device: str) -> list[str]:
        """Return the command line options of a server that computes on ``device`` in float32."""
        return [*self.common, "--dtype", "float32", "--device", device]

    def log(self, name: str) -> Path:
        """Return the path of the log file of the server with this name."""
        return self.part.log(name)


def make_asked(part: Part, sizes: Mapping[str, int] = SIZES) -> Asked:
    """Save a random model, and have transformers generate the expected answers to some prompts with it.

    ``sizes``: entries of its configuration. A dry run has two layers.
    """
    folder = part.scratch
    model = save_model(folder / "model", {**sizes, "num_hidden_layers": 2} if part.dry_run else sizes)
    rng = np.random.default_rng(0)
    lens = (5, 40) if part.dry_run else PROMPTS
    prompts = [rng.integers(3, CONFIG["vocab_size"], length).tolist() for length in lens]
    options = [*part.server_tokenizer, *OPTIONS]
    return Asked(part, folder, options, model, prompts, answers_of(model, prompts))


def compare(
    args: Sequence[str], log: Path, prompts: Prompts, expected: Tokens, least: float, length: int = LENGTH
) -> Finding:
    """Run a server with ``args``, and compare its tokens for each prompt with ``expected``.

    Each prompt is sent twice: the second time its prefix is cached. ``least``: share of the tokens that must agree. A
    kernel that is compiled meanwhile is a failure.
    """
    with serve(args, log) as address:
        backend = _backend(address)
        found = [generate(address, prompt, length) for prompt in [*prompts, *prompts]]
        compiled = compiled_kernels(address)
    return without_compiles(judge(found, [*expected, *expected], least, backend), compiled)


def compiled_kernels(address: str) -> int:
    """Return how many kernels the server has compiled since it was ready."""
    count: int = ask(f"{address}/server_info")["counters"]["compiled_kernels"]
    return count


def without_compiles(found: Finding, compiled: int) -> Finding:
    """Return ``found``, changed to failed if ``compiled``, the kernels compiled while serving, is above 0."""
    figure = f"{found.figure}, {compiled} kernels compiled while serving" if compiled else found.figure
    asked = f"{found.asked}, no kernel compiled while serving"
    return Finding(found.name, figure, asked, bool(found.ok) and not compiled)


def judge(found: Tokens, expected: Tokens, least: float, what: str) -> Finding:
    """Return how many tokens of the answers agree with ``expected`` before the first difference in each.

    It is met if their share is at least ``least``. ``what``: words for the finding.
    """
    same = sum(_common(one, other) for one, other in zip(found, expected, strict=True))
    total = sum(map(len, expected))
    asked = SAME if least == 1.0 else f"at least {least:.0%} of them"
    return Finding("", f"{same} of {total} the same ({what})", asked, same >= least * total)


def save_model(folder: Path, changes: Mapping[str, int]) -> Any:
    """Save a random Llama in ``folder``, and return it as a model of transformers.

    ``changes``: entries of its configuration that differ from ``CONFIG``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = CONFIG | {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **changes}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    return model


def save_packed(folder: Path, model: Any, ending: str) -> tuple[list[str], Any]:
    """Save ``model`` to ``folder``, with the weights named ``*ending`` in FP8 and a scale for each of their rows.

    Returns a server's options for it, and a model of transformers with the dequantised weights.
    """
    from safetensors.torch import save_file

    stored: dict[str, torch.Tensor] = {}
    dequantised = copy.deepcopy(model)
    for name, tensor in dequantised.state_dict().items():
        if not name.endswith(ending):
            stored[name] = tensor
            continue
        scales = tensor.abs().amax(1, keepdim=True) / 448
        stored[name] = (tensor / scales).to(torch.float8_e4m3fn)
        stored[name.removesuffix(".weight") + ".weight_scale"] = scales
        tensor.copy_(stored[name].float() * scales)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    weights = {"type": "float", "num_bits": 8, "strategy": "channel"}
    how = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    config = model.config.to_dict() | {"quantization_config": how}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return ["--model-path", str(folder), "--quantization", "packed"], dequantised


@torch.inference_mode()
def answers_of(model: Any, prompts: Prompts) -> Tokens:
    """Return the ``LENGTH`` tokens that transformers generates greedily after each prompt, in float32 on the CPU."""
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def _backend(address: str) -> str:
    info = ask(f"{address}/server_info")
    return str(info.get("worker", info).get("attention_backend", "?"))


def _common(one: list[int], other: list[int]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
