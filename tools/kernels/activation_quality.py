"""Measures what rounding activations costs: ``python -P -m tools.kernels.activation_quality``.

Compares ways to multiply activations with a GGUF file's own blocks. The measure is the KL divergence of the next
token's distribution from that of transformers in float32 on the dequantised blocks. Two sets of texts:

- questions: 512 chats of one question each, without a system prompt, continued greedily by the reference; at the
  answer's first tokens
- text: the windows of ``text_windows.py``; at each token

A way is the CPU engine with all its rounding, or transformers in float32 with only the inputs of linear layers rounded.
The second kind shows what a way without a kernel would cost.

Shapes: W tokens of a text, V vocabulary, I inputs of a linear layer.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.text.load import load_tokenizer
from pdserve.model_runner.calibration.text_windows import read_windows
from pdserve.server.options import ServerOptions

from .perplexity import (
    Way,
    dequantised,
    pdserve_way,
    transformers_model,
    transformers_way,
)

SUBJECTS = (
    *("France", "Japan", "Brazil", "Kenya", "Canada", "Norway", "Egypt", "Peru", "India", "Poland", "Iceland", "Cuba"),
    *("gravity", "photosynthesis", "an earthquake", "a rainbow", "the tides", "a volcano", "lightning", "erosion"),
    *("a neuron", "DNA", "a vaccine", "the heart", "a virus", "an enzyme", "the liver", "a muscle", "a protein"),
    *("a triangle", "a prime number", "a derivative", "a matrix", "probability", "an integral", "a vector", "zero"),
    *("Python", "a database", "a compiler", "the internet", "a hash table", "recursion", "a cache", "encryption"),
    *("Shakespeare", "Mozart", "Newton", "Marie Curie", "Napoleon", "Cleopatra", "Picasso", "Darwin", "Gandhi"),
    *("bread", "coffee", "chess", "a bicycle", "a piano", "an airplane", "a telescope", "a bridge", "a clock", "rice"),
)
QUESTIONS = (
    "What is {}?",
    "Where does one find {}, and why?",
    "Explain {} to a child in two sentences.",
    "Name three facts about {}.",
    "Write a short poem about {}.",
    "What is the most common mistake about {}?",
    "Translate 'I like {}' into French.",
    "Who would you ask about {}?",
)


class Text(NamedTuple):
    """A text. ``ids``: [W]. Predictions of the tokens from index ``first`` on are compared."""

    ids: Tensor
    first: int


class Score(NamedTuple):
    """Means over the compared places of one set of texts."""

    perplexity: float
    """The exponential of the mean of -ln p(token)."""
    divergence: float
    """KL(reference || way), nats per token."""
    agreement: float
    """Share of places where the likeliest token is the reference's."""


def main() -> None:
    """Score each way to round activations on both sets of texts, and print a table for each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2", help="a GGUF (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--ways", choices=("all", "engine", "rounding"), default="all", help="(default: %(default)s)")
    args = parser.parse_args()
    source, options = resolve_model(args.model_path), ServerOptions(model_path=args.model_path)
    model = transformers_model(source, dequantised(source))
    windows = [Text(ids, 1) for ids in read_windows(options, args.tokens, args.window)]
    sets = {"questions": list(answered(model, questions(options, args.questions), args.answer)), "text": windows}
    ways = {} if args.ways == "rounding" else dict(engine_ways(args.model_path, args.window))
    ways |= {} if args.ways == "engine" else dict(rounded_ways(model))
    reference = transformers_way(model)
    for name, texts in sets.items():
        places = sum(len(text.ids) - text.first for text in texts)
        print(f"\n{name}: {len(texts)} texts, {places} places")
        print(f"{'':44} {'perplexity':>11} {'KL (nats)':>10} {'same token':>11}", flush=True)
        expected = [places_of(reference, text) for text in texts]
        for way, compute in {"transformers, float32": reference, **ways}.items():
            score = measure(compute, texts, expected)
            print(f"{way:44} {score.perplexity:11.4f} {score.divergence:10.2e} {score.agreement:11.4f}", flush=True)


def questions(options: ServerOptions, count: int) -> list[Tensor]:
    """Return the first ``count`` chats of one question each, as token ids."""
    tokenizer = load_tokenizer(options)
    chosen = itertools.islice(((question, subject) for subject in SUBJECTS for question in QUESTIONS), count)
    chats = [
        f"<|im_start|>user\n{question.format(subject)}<|im_end|>\n<|im_start|>assistant\n"
        for question, subject in chosen
    ]
    return [torch.tensor(ids) for ids in tokenizer.encode_batch(chats, add_special_tokens=False)]


def answered(model: Any, prompts: Sequence[Tensor], tokens: int) -> Iterator[Text]:
    """Yield each of ``prompts`` with the reference model's greedy answer of ``tokens`` tokens; the shortest come first.

    Prompts of one length are computed together.
    """
    for length, same in itertools.groupby(sorted(prompts, key=len), key=len):
        ids = torch.stack(list(same))
        with torch.inference_mode():
            answers = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
            )
        yield from (Text(row, length) for row in answers)


def engine_ways(model_path: str, window: int) -> Iterator[tuple[str, Way]]:
    """Yield the CPU engine's ways to compute, each with its name. ``window``: length of the longest text, in tokens."""
    yield "engine, float32", pdserve_way(model_path, window, "float32")
    yield "engine, bfloat16 (dequantised)", pdserve_way(model_path, window, "bfloat16")
    yield "engine, blocks, int16", pdserve_way(model_path, window, "bfloat16", "gguf")
    yield "engine, blocks, int8", pdserve_way(model_path, window, "bfloat16", "gguf", activations="int8")


def rounded_ways(model: Any) -> Iterator[tuple[str, Way]]:
    """Yield, with their names, ways that run ``model`` with the inputs of its linear layers rounded."""
    for size in (32, 16, 8):
        yield f"rounding alone: 8 bits, runs of {size}", rounded_way(model, by_runs(8, size))
    for kept in (1, 4):
        yield f"rounding alone: 8 bits, {kept} of 32 kept as floats", rounded_way(model, without_largest(8, 32, kept))
    for bits in (12, 16):
        yield f"rounding alone: {bits} bits, runs of 32", rounded_way(model, by_runs(bits, 32))
    yield "rounding alone: bfloat16", rounded_way(model, lambda x: x.bfloat16().float())


def by_runs(bits: int, size: int) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds inputs to whole numbers of ``bits`` bits; ``size`` neighbours share a scale."""

    def round_inputs(x: Tensor) -> Tensor:
        padded = pad(x, (0, -x.shape[-1] % size))
        runs = padded.view(*padded.shape[:-1], -1, size)
        scale = (runs.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=1e-30)
        rounded: Tensor = ((runs / scale).round() * scale).view_as(padded)
        return rounded[..., : x.shape[-1]]

    return round_inputs


def without_largest(bits: int, size: int, kept: int) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds like ``by_runs``, but keeps the ``kept`` largest inputs of each run as they are.

    The scale is that of the rounded inputs.
    """
    round_inputs = by_runs(bits, size)

    def round_rest(x: Tensor) -> Tensor:
        runs = x.view(*x.shape[:-1], -1, size)
        is_kept = torch.zeros_like(runs, dtype=torch.bool)
        is_kept.scatter_(-1, runs.abs().topk(kept, -1).indices, True)
        return torch.where(is_kept, runs, round_inputs(runs.masked_fill(is_kept, 0.0))).view_as(x)

    return round_rest


def rounded_way(model: Any, round_inputs: Callable[[Tensor], Tensor]) -> Way:
    """Return a way that runs ``model`` with ``round_inputs`` before each linear layer."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    whole = transformers_way(model)

    def run(ids: Tensor) -> Tensor:
        with ExitStack() as stack:
            for linear in linears:
                hook = linear.register_forward_pre_hook(lambda _, inputs: (round_inputs(inputs[0]),))
                stack.callback(hook.remove)
            return whole(ids)

    return run


def places_of(way: Way, text: Text) -> Tensor:
    """Compute the logits [P, V] that predict the tokens of ``text`` from index ``first`` on."""
    return way(text.ids)[text.first - 1 : len(text.ids) - 1].clone()


def measure(way: Way, texts: Sequence[Text], expected: Sequence[Tensor]) -> Score:
    """Return the scores of one way over ``texts``. ``expected``: the reference's logits of each text."""
    loss = divergence = agreement = 0.0
    for text, logits in zip(texts, expected, strict=True):
        truth, log_p = logits.double().log_softmax(-1), places_of(way, text).double().log_softmax(-1)
        loss -= float(log_p.gather(-1, text.ids[text.first :, None]).sum())
        divergence += float((truth.exp() * (truth - log_p)).sum())
        agreement += float((truth.argmax(-1) == log_p.argmax(-1)).sum())
    count = sum(len(logits) for logits in expected)
    return Score(math.exp(loss / count), divergence / count, agreement / count)


if __name__ == "__main__":
    main()
