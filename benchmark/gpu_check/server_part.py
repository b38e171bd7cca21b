"""Real servers: in float32 the GPU's tokens are those of the CPU engine and of transformers, with graphs and without,
and nothing in a step's launch waits for the GPU.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .part import Part, open_part
from .record import Finding
from .servers import ask, generate, serve

Prompts = list[list[int]]
Tokens = list[list[int]]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIG = SIZES | {"num_key_value_heads": 2, "vocab_size": 49152, "head_dim": 64, "max_position_embeddings": 2048}
LENGTH = 24
SAME = "the same tokens"


def main() -> None:
    """All servers, one after another."""
    part = open_part("server")
    with tempfile.TemporaryDirectory() as folder:
        check_servers(part, Path(folder))
    part.recorder.finish()


def check_servers(part: Part, folder: Path) -> None:
    """``folder``: for the model and the logs."""
    model = save_model(folder / "model", 2 if part.dry_run else SIZES["num_hidden_layers"])
    rng = np.random.default_rng(0)
    lens = (5, 40) if part.dry_run else (5, 40, 300, 17, 64, 100)
    prompts = [rng.integers(3, CONFIG["vocab_size"], length).tolist() for length in lens]
    of_any = ["--tokenizer-path", "smollm2", "--max-total-tokens", "8192"]
    common = ["--model-path", str(folder / "model"), *of_any]
    device, reference = part.device.type, answers_of(model, prompts)
    exact = [*common, "--dtype", "float32"]

    def check(name: str, args: Sequence[str], expected: Tokens = reference, least: float = 1.0) -> None:
        log = folder / f"{name.replace(' ', '-')}.log"
        part.recorder.check(name, lambda: compare(args, log, prompts, expected, least))

    check("CPU engine, float32, against transformers", [*exact, "--device", "cpu"])
    on_type = ["--dtype", "float32", "--device", device]
    on_device = [*common, *on_type]

    def check_kv(name: str, backend: str, prefill: Sequence[str], decode: Sequence[str]) -> None:
        sides = prefill, decode
        part.recorder.check(name, lambda: check_pair(backend, sides, folder, prompts, reference))

    def check_packed(name: str, args: Sequence[str]) -> None:
        packed, answer_by = save_packed(folder / "packed", model, "down_proj.weight" if part.dry_run else "proj.weight")
        few, length = (prompts[:1], 3) if part.dry_run else (prompts, LENGTH)
        expected = [tokens[:length] for tokens in answers_of(answer_by, few)]
        log = folder / "packed.log"
        part.recorder.check(name, lambda: compare([*packed, *of_any, *on_type, *args], log, few, expected, 1.0, length))

    if part.dry_run:
        # The interpreter takes long for products: a short context makes the steps of the start short, too.
        few = ["--attention-backend", "torch", "--context-length", "24"]
        check_packed("FP8 weights that stay packed, float32, against transformers", few)
        for backend in ("torch", "triton"):
            check(f"{backend}, float32, against transformers", [*on_device, "--attention-backend", backend])
        staged = [*on_device, "--attention-backend", "torch", "--kv-staging-size", "0.002"]
        check_kv("prefill and decode through host memory, by tcp", "tcp", staged, staged)
        return
    strict = ["--attention-backend", "triton", "--fail-on-host-sync"]
    check("triton, float32, graphs", [*on_device, *strict])
    check("triton, float32, no graphs", [*on_device, *strict, "--disable-cuda-graph"])
    check("triton, float32, no overlap", [*on_device, *strict, "--disable-overlap-schedule"])
    check_packed("FP8 weights that stay packed, float32, graphs", strict)
    check("torch backend, float32", [*on_device, "--attention-backend", "torch"])
    triton, on_cpu = [*on_device, "--attention-backend", "triton"], [*exact, "--device", "cpu"]
    check_kv("prefill and decode on one GPU, by tcp", "tcp", triton, triton)
    check_kv("prefill on the CPU, decode on the GPU, by shm", "shm", on_cpu, triton)
    check_kv("prefill on the GPU, decode on the CPU, by shm", "shm", triton, on_cpu)
    half = [*common, "--dtype", "bfloat16", "--device", device]
    for backend in ("triton", "flashinfer"):
        # In 16 bits rounding decides now and then, and what follows is another text.
        check(f"{backend}, bfloat16, graphs", [*half, "--attention-backend", backend, "--fail-on-host-sync"], least=0.5)
    again = [*exact, "--device", device, "--attention-backend", "triton"]
    part.recorder.check("memory given back and taken again", lambda: check_memory(again, folder, prompts, reference))


def compare(
    args: Sequence[str], log: Path, prompts: Prompts, expected: Tokens, least: float, length: int = LENGTH
) -> Finding:
    """Each prompt's tokens, asked twice: the second time its prefix is cached. ``least``: share that must agree."""
    with serve(args, log) as address:
        backend = _backend(address)
        found = [generate(address, prompt, length) for prompt in [*prompts, *prompts]]
    return judge(found, [*expected, *expected], least, backend)


def judge(found: Tokens, expected: Tokens, least: float, what: str) -> Finding:
    """How many tokens agree up to the first that does not."""
    same = sum(_common(one, other) for one, other in zip(found, expected, strict=True))
    total = sum(map(len, expected))
    asked = SAME if least == 1.0 else f"at least {least:.0%} of them"
    return Finding("", f"{same} of {total} the same ({what})", asked, same >= least * total)


def check_memory(args: Sequence[str], folder: Path, prompts: Prompts, expected: Tokens) -> Finding:
    """The same tokens after weights and KV pool were away, and as many bytes as they take free meanwhile."""
    with serve(args, folder / "memory.log") as address:
        use = ask(f"{address}/server_info")["memory"]
        freed = ask(f"{address}/release_memory_occupation", {}, 30.0)["freed_bytes"]
        ask(f"{address}/resume_memory_occupation", {}, 60.0)
        found = judge([generate(address, prompt, LENGTH) for prompt in prompts], expected, 1.0, "")
    share = freed / (use["weights"] + use["kv_pool"])
    told = f"{share:.0%} of weights and pool given back, then {found.figure}"
    return Finding("", told, f"90%, then {SAME}", bool(found.ok) and share >= 0.9)


def check_pair(
    backend: str, sides: tuple[Sequence[str], Sequence[str]], folder: Path, prompts: Prompts, expected: Tokens
) -> Finding:
    """A prefill and a decode instance, by the options of each, with KV from one to the other by ``backend``."""
    transfer = ["--disaggregation-transfer-backend", backend]
    prefill = [*sides[0], *transfer, "--disaggregation-mode", "prefill"]
    decode = [*sides[1], *transfer, "--disaggregation-mode", "decode", "--disaggregation-threshold", "always"]
    port = 18998
    with (
        serve([*prefill, "--disaggregation-bootstrap-port", str(port)], folder / "prefill.log") as one,
        serve(decode, folder / "decode.log") as other,
    ):
        found = []
        for room, prompt in enumerate(prompts, 1):
            where: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
            generate_later = _later(one, prompt, where)
            found.append(generate(other, prompt, LENGTH, **where))
            generate_later.join(30)
    return judge(found, expected, 1.0, f"by {backend}")


def _later(address: str, prompt: Sequence[int], where: dict[str, Any]) -> Any:
    import threading

    thread = threading.Thread(target=generate, args=(address, prompt, LENGTH), kwargs=where, daemon=True)
    thread.start()
    return thread


def save_model(folder: Path, layers: int) -> Any:
    """A random Llama in ``folder``, and in transformers' hands."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = CONFIG | {"num_hidden_layers": layers, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    model.save_pretrained(folder)
    return model


def save_packed(folder: Path, model: Any, ending: str) -> tuple[list[str], Any]:
    """The model with weights whose names end so in FP8, a scale a row: what a server is told of it, and transformers'
    model with the weights that they come to.
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
    """What transformers generates, in float32 on the CPU."""
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


if __name__ == "__main__":
    main()
