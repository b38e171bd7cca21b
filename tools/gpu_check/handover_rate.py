"""How fast KV goes from one instance to another, with checksums and without, and what it adds to a first token."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .pair import Pair, missing, serve_pair
from .part import Part
from .record import Check, Finding

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
LLAMA |= {"torch_dtype": "bfloat16", "vocab_size": 49152, "max_position_embeddings": 4096, "bos_token_id": 1}
LLAMA |= {"eos_token_id": 2, "tie_word_embeddings": True}
KV_OF_8B = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 32, "num_attention_heads": 8}
KV_OF_8B |= {"num_key_value_heads": 8, "head_dim": 128}
"""KV as large as a Llama 3.1 8B's, 128 KiB a token, behind little else."""
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 2, "head_dim": 32}
BYTES_SENT = "pdserve_kv_sent_bytes_total"
PUSH_SECONDS = "pdserve_prefill_leg_push_seconds_sum"
ADDED_SECONDS = "pdserve_request_transfer_seconds_sum"


class Totals(NamedTuple):
    """Counters of a pair since its start."""

    nbytes: float
    push_seconds: float
    added_seconds: float


def checks(part: Part) -> Iterator[Check]:
    """Yield a name and a function for each measurement of hand-over speed: by backend, with and without checksums."""
    unchecked = ["--disable-handover-checksum"]
    for backend in ("shm",) if part.dry_run else ("cuda_ipc", "tcp"):
        yield f"{backend}, with checksums", lambda b=backend: measure(part, b, [])  # type: ignore[misc]
        yield f"{backend}, without checksums", lambda b=backend: measure(part, b, unchecked)  # type: ignore[misc]


def measure(part: Part, backend: str, decode_options: list[str]) -> Finding:
    """Hand prompts over, one at a time, from a prefill to a decode. Report GB/s and the time added to the first token.

    The rate is the bytes sent by the time that the transfer engine spent.
    """
    if why_not := missing(backend):
        return Finding("", f"not run: {why_not}")
    tokens, rounds = (40, 2) if part.dry_run else (2048, 8)
    folder = part.scratch / "kv"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | (TINY if part.dry_run else KV_OF_8B)))
    options = ["--model-path", str(folder), "--load-format", "dummy", "--device", part.device.type]
    options += [*part.server_tokenizer, "--max-total-tokens", "1024" if part.dry_run else "32768"]
    options += [] if part.dry_run else ["--attention-backend", "triton"]
    logs = part.log(f"rate {backend} P"), part.log(f"rate {backend} D")
    rng = np.random.default_rng(0)
    with serve_pair(backend, options, [*options, *decode_options], logs) as pair:

        def hand_over(room: int) -> None:
            pair.answer(room, rng.integers(3, 40_000, tokens).tolist(), 2)

        for room in (1, 2):
            hand_over(room)
        before = totals(pair)
        for room in range(3, 3 + rounds):
            hand_over(room)
        spent = Totals(*(now - then for now, then in zip(totals(pair), before, strict=True)))
    rate = spent.nbytes / max(spent.push_seconds, 1e-9) / 1e9
    figure = (
        f"{rate:.2f} GB/s, {spent.push_seconds / rounds * 1e3:.2f} ms for {spent.nbytes / rounds / 2**20:.1f} MiB of "
    )
    figure += f"{tokens} tokens; {spent.added_seconds / rounds * 1e3:.2f} ms more until the first token"
    return Finding("", figure)


def totals(pair: Pair) -> Totals:
    """Read a pair's counters of bytes sent, seconds of sending, and seconds that hand-overs added, since its start."""
    return Totals(
        counter(pair.prefill, BYTES_SENT), counter(pair.prefill, PUSH_SECONDS), counter(pair.decode, ADDED_SECONDS)
    )


def counter(address: str, name: str) -> float:
    """Return the sum of the samples called ``name`` at ``/metrics``; raises ``LookupError`` if there is none."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    if not found:
        raise LookupError(f"{address}/metrics has no {name}")
    return sum(map(float, found))
