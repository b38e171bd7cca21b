"""Measures what each way to compute costs in quality: ``python -P -m tools.kernels.perplexity``.

The text is the default one of ``calibration/text_windows.py``, cut into independent windows. Every way computes the
logits of every token, through the same path as a prefill of the server. It is compared with transformers in float32 on
the same weights:

- perplexity: the exponential of the mean of -ln p(token), over all tokens of a window but its first
- divergence: the mean over the same tokens of KL(reference || way), in nats per token

All ways are in memory together, so that the reference runs once a window: 3.5 GiB for the default model and windows.

Shapes: W tokens of a window, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pdserve.model_files.families.registry import spec_from_hf
from pdserve.model_files.model_path import ModelSource, resolve_model
from pdserve.model_files.rope_order import row_order
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.tensor_names import HEAD, find_parts
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.calibration.text_windows import read_windows
from pdserve.model_runner.device.choice import KVDTypeName
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.loader.load import load_model_weights
from pdserve.model_runner.loader.quantization import QuantizedActivations
from pdserve.model_runner.models.decoder import Decoder
from pdserve.server.options import ServerOptions

REFERENCE = "transformers float32"
ROWS = 64
"""Rows of logits that are compared at a time, in float64."""

DTypeName = Literal["float32", "bfloat16"]
Quantization = Literal["none", "gguf", "int8", "int4"]
KV_DTYPES: Sequence[KVDTypeName] = ("fp8_e4m3", "fp8_e5m2", "int8")
Way = Callable[[Tensor], Tensor]
"""Logits [W, V] float32 of a window's token ids, int64 [W]."""


class Score(NamedTuple):
    """``perplexity``, and ``divergence`` from the reference in nats per token."""

    perplexity: float
    divergence: float


def main() -> None:
    """Score each way to compute on the text's windows, and print perplexities and divergences from the reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens of the text's beginning (default: %(default)s)"
    )
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--model-path", default="smollm2", help="as the server takes it (default: %(default)s)")
    args = parser.parse_args()
    if not 2 <= args.window <= args.tokens:
        parser.error("--window is at least 2 and at most --tokens")
    windows = read_windows(ServerOptions(model_path=args.model_path), args.tokens, args.window)
    if len(windows) < args.tokens // args.window:
        parser.error(f"the text has only {windows.numel()} tokens in whole windows")
    print(
        f"{args.model_path}, Python {platform.python_version()}: "
        f"{windows.numel()} tokens in {len(windows)} windows of {args.window}"
    )
    ways = dict(make_ways(args.model_path, args.window))
    scores = measure(ways, windows)
    print(f"\n{'':42} {'perplexity':>11} {'ratio':>9} {'KL (nats per token)':>20}")
    for name, score in scores.items():
        ratio = score.perplexity / scores[REFERENCE].perplexity
        print(f"{name:42} {score.perplexity:11.4f} {ratio:9.5f} {score.divergence:20.2e}")


def make_ways(model_path: str, window: int) -> Iterator[tuple[str, Way]]:
    """Yield each way to compute with its name, the reference first. ``window``: maximum tokens of a text.

    Each model is loaded when its way is drawn.
    """
    source = resolve_model(model_path)
    model = transformers_model(source, dequantised(source))
    yield REFERENCE, transformers_way(model)
    yield "transformers bfloat16", transformers_way(in_bfloat16(model))
    yield "pdserve float32", pdserve_way(model_path, window, "float32")
    yield "pdserve bfloat16", pdserve_way(model_path, window, "bfloat16")
    quantizations: Sequence[Quantization] = ("gguf", "int8", "int4")
    for quantization in quantizations:
        if quantization != "gguf" or source.kind == "gguf":
            yield f"pdserve bfloat16, {quantization}", pdserve_way(model_path, window, "bfloat16", quantization)
            name = f"pdserve bfloat16, {quantization}, int8 activations"
            yield name, pdserve_way(model_path, window, "bfloat16", quantization, activations="int8")
    for kv_dtype in KV_DTYPES:
        yield f"pdserve bfloat16, KV {kv_dtype}", pdserve_way(model_path, window, "bfloat16", kv_dtype=kv_dtype)


def dequantised(source: ModelSource) -> dict[str, Tensor]:
    """Load the weights by pdserve's own loader and return them in float32, by our names for them."""
    spec = read_spec(source)
    weights = Decoder(spec, torch.float32, torch.device("cpu")).weights()
    load_model_weights(weights, source, spec, "auto", 0)
    return weights


def transformers_model(source: ModelSource, weights: dict[str, Tensor]) -> Any:
    """Make the model of transformers in float32, with ``weights`` (by our names).

    Its config is what transformers itself reads in the files, so that a mistake in our own reading shows.
    """
    # Imported here: it takes seconds.
    from transformers import AutoConfig, AutoModelForCausalLM

    if source.kind == "gguf":
        config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name, trust_remote_code=False)
    else:
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    theirs = as_theirs(config.to_dict(), list(model.state_dict()), weights)
    missing, unexpected = model.load_state_dict(theirs, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"transformers has other weights: {missing} are missing, {unexpected} are too many")
    model.tie_weights()
    return model


def as_theirs(config: dict[str, Any], names: Sequence[str], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our ``weights`` as the tensors ``names`` of a Hugging Face model. ``config``: that model's.

    Tensors that we lack any part of are left out.
    """
    spec = spec_from_hf(config)
    theirs = {}
    for name in names:
        parts = [part.name for part in find_parts(spec, name)]
        if not parts or (parts == [HEAD] and HEAD not in weights):
            continue
        rows = []
        for part in parts:
            order = row_order(spec, part)
            rows.append(weights[part] if order is None else weights[part][torch.from_numpy(order.argsort())])
        theirs[name] = torch.cat(rows)
    return theirs


def in_bfloat16(model: Any) -> Any:
    """Return a copy of a model with its weights rounded to bfloat16.

    Its rotary frequencies stay in float32, as in transformers.
    """
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    return rounded


def transformers_way(model: Any) -> Way:
    """Return a function that computes a text's logits by a model of transformers, in the type of its weights."""

    def run(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(ids[None], use_cache=False).logits[0]
            return logits.float()

    return run


def pdserve_way(
    model_path: str,
    window: int,
    dtype: DTypeName,
    quantization: Quantization = "none",
    kv_dtype: KVDTypeName = "auto",
    activations: QuantizedActivations = "int16",
) -> Way:
    """Load the CPU engine, and return a function that computes the logits of a text of at most ``window`` tokens.

    The other parameters are those of ``--dtype``, ``--quantization``, ``--kv-cache-dtype`` and
    ``--quantized-activations``. Raises ``ModelError`` if it can't run.
    """
    options = ServerOptions(
        model_path=model_path,
        device="cpu",
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_dtype,
        quantized_activations=activations,
        attention_backend="cpu",
        max_total_tokens=window + ServerOptions().page_size,
        chunked_prefill_size=-1,  # all of a text at once, so no page of it goes back
    )
    runner = load_model(options)
    table = torch.arange(window, dtype=torch.int32)[None] + options.page_size

    def run(ids: Tensor) -> Tensor:
        positions = torch.arange(len(ids))
        batch = ForwardBatch(
            input_ids=ids,
            positions=positions,
            out_cache_loc=table[0, : len(ids)].long(),
            rows=torch.zeros(1, dtype=torch.int64),
            starts=[0],
            q_lens=[len(ids)],
            req_to_token=table,
            logit_indices=positions,
        )
        return torch.from_numpy(runner.engine.host_logits(batch.on_host()))

    return run


def measure(ways: dict[str, Way], windows: Tensor) -> dict[str, Score]:
    """Return the scores of each way over ``windows``, by name. The first of ``ways`` is the reference."""
    losses, divergences = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    for ids in windows:
        expected: Tensor | None = None
        for name, way in ways.items():
            logits = way(ids)[:-1]
            if expected is None:
                expected = logits.double().log_softmax(-1)
            loss, divergence = _compare(logits, expected, ids[1:])
            losses[name] += loss
            divergences[name] += divergence
    places = windows.numel() - len(windows)
    return {name: Score(math.exp(losses[name] / places), divergences[name] / places) for name in ways}


def _compare(logits: Tensor, expected: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return sums over all rows: of -ln p(target), and of the divergence of ``logits`` from ``expected``.

    ``expected``: log probabilities. It computes in float64, because the divergence of float32 from float32 is less than
    the rounding of a float32 logarithm.
    """
    loss = divergence = 0.0
    blocks = (torch.split(tensor, ROWS) for tensor in (logits, expected, targets))
    for part, truth, wanted in zip(*blocks, strict=True):
        log_p = part.double().log_softmax(-1)
        loss -= float(log_p.gather(1, wanted[:, None]).sum())
        divergence += float((truth.exp() * (truth - log_p)).sum())
    return loss, divergence


if __name__ == "__main__":
    main()
