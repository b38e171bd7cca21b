"""GGUF files with metadata, tensors, tokens and merges that agree, disagree, or are damaged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from .answers import Texts
from .bases import make_model
from .gguf_parts import ARCHITECTURE, GGUFParts
from .variant import MODEL, TEXT

Edit = Callable[[GGUFParts], object]


def same_texts(texts: Texts) -> Texts:
    """Return the texts of the unchanged tokenizer."""
    return texts


class GGUFVariant(NamedTuple):
    """A changed GGUF of a base.

    ``refusal``: what the message must contain, "" if any name will do; None: the file is served. ``reference``:
    makes the model that it must equal. ``texts``: makes the expected texts of those of the base.
    On the side ``GGUF_TEXT``, the texts must be those of transformers' tokenizer of the file itself.
    """

    name: str
    base: str
    edit: Edit
    side: str = MODEL
    lengths: tuple[int, ...] = (9, 90)
    refusal: str | None = None
    reference: Callable[[str], torch.nn.Module] = make_model
    texts: Callable[[Texts], Texts] = same_texts


def key(name: str, value: Any) -> Edit:
    """Return an edit that states ``value`` under a key of the architecture, or drops the key for None."""

    def edit(parts: GGUFParts) -> None:
        _put(parts, parts.key(name), value)

    return edit


def ggml(name: str, value: Any) -> Edit:
    """Return an edit that states ``value`` under a key of the tokenizer, or drops the key for None."""

    def edit(parts: GGUFParts) -> None:
        _put(parts, f"tokenizer.ggml.{name}", value)

    return edit


def each(*edits: Edit) -> Edit:
    """Return an edit that makes ``edits`` one after another."""

    def edit(parts: GGUFParts) -> None:
        for one in edits:
            one(parts)

    return edit


def _put(parts: GGUFParts, name: str, value: Any) -> None:
    parts.metadata.pop(name, None)
    if value is not None:
        parts.metadata[name] = value


def _tokens(change: Callable[[list[str]], Any]) -> Edit:
    def edit(parts: GGUFParts) -> None:
        parts.metadata["tokenizer.ggml.tokens"] = change(list(parts.metadata["tokenizer.ggml.tokens"]))

    return edit


def _merges(change: Callable[[list[str]], Any]) -> Edit:
    def edit(parts: GGUFParts) -> None:
        parts.metadata["tokenizer.ggml.merges"] = change(list(parts.metadata["tokenizer.ggml.merges"]))

    return edit


def _tensor(name: str, change: Callable[[np.ndarray], np.ndarray] | None) -> Edit:
    """Return an edit of a tensor; None: it is left out."""

    def edit(parts: GGUFParts) -> None:
        if change is None:
            del parts.tensors[name]
        else:
            parts.tensors[name] = np.ascontiguousarray(change(parts.tensors[name]))

    return edit


def _new_tensor(name: str, values: np.ndarray) -> Edit:
    return lambda parts: parts.tensors.update({name: values.astype(np.float32)})


def _cut(length: int) -> Edit:
    def edit(parts: GGUFParts) -> None:
        parts.length = length

    return edit


def _behind(parts: GGUFParts) -> None:
    parts.behind = b"\0" * 64


def _replaced(before: bytes, after: bytes) -> Edit:
    assert len(before) == len(after)
    return lambda parts: parts.replaced.update({before: after})


def with_rope(**rope: Any) -> Callable[[str], torch.nn.Module]:
    """Return what makes a base's model with another rope of its theta."""

    def make(base: str) -> torch.nn.Module:
        model = make_model(base)
        config = copy.deepcopy(model.config)
        config.rope_parameters = {**rope, "rope_theta": config.rope_parameters["rope_theta"]}
        other = type(model)(config)
        other.load_state_dict(model.state_dict())
        return other.eval()

    return make


def with_tied_head(base: str) -> torch.nn.Module:
    """Make a base's model with the table of embeddings as its head."""
    model = copy.deepcopy(make_model(base))
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


LINEAR = with_rope(rope_type="linear", factor=4.0)
YARN = with_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
SCALING = "rope.scaling"
Case = tuple[Edit, str | None]
EPSILON, PATTERN = "attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern"
SERVED: dict[str, tuple[Edit, Callable[[str], torch.nn.Module]]] = {
    "as it is": (lambda _: None, make_model),
    "an unknown key": (lambda p: p.metadata.update({"general.spice": "x"}), make_model),
    "an unknown key of the architecture": (key("spice", 3), make_model),
    "another vocab_size": (key("vocab_size", 999), make_model),
    "no vocab_size": (key("vocab_size", None), make_model),
    "one part": (lambda p: p.metadata.update({"split.count": 1}), make_model),
    "bytes behind the last tensor": (_behind, make_model),
    "KV heads by layer": (key("attention.head_count_kv", [2, 2]), make_model),
    "factor 1": (key(f"{SCALING}.factor", 1.0), make_model),
    "type none, with a factor": (each(key(f"{SCALING}.type", "none"), key(f"{SCALING}.factor", 4.0)), make_model),
    "type linear": (each(key(f"{SCALING}.type", "linear"), key(f"{SCALING}.factor", 4.0)), LINEAR),
    "a factor without a type": (key(f"{SCALING}.factor", 4.0), LINEAR),
    "the older factor": (key("rope.scale_linear", 4.0), LINEAR),
    "both factors": (each(key("rope.scale_linear", 2.0), key(f"{SCALING}.factor", 4.0)), LINEAR),
    "type yarn": (
        each(
            key(f"{SCALING}.type", "yarn"),
            key(f"{SCALING}.factor", 4.0),
            key(f"{SCALING}.original_context_length", 64),
        ),
        YARN,
    ),
    "a yarn of no original context": (
        each(
            key(f"{SCALING}.type", "yarn"), key(f"{SCALING}.factor", 4.0), key(f"{SCALING}.original_context_length", 0)
        ),
        with_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=256),
    ),
    "scales of none": (
        each(key("attention.temperature_scale", 0.0), key("attention.output_scale", 1.0), key(PATTERN, 0)),
        make_model,
    ),
    "frequencies of ones": (_new_tensor("rope_freqs.weight", np.ones(4)), make_model),
}
REFUSED: dict[str, Case] = {
    "no context_length": (key("context_length", None), "context_length"),
    "no block_count": (key("block_count", None), "block_count"),
    "fewer blocks": (key("block_count", 1), "blk.1"),
    "more blocks": (key("block_count", 3), "layers.2"),
    "no blocks": (key("block_count", 0), "layers 0"),
    "more heads": (key("attention.head_count", 8), ""),
    "more KV heads": (key("attention.head_count_kv", 4), ""),
    "other KV heads by layer": (key("attention.head_count_kv", [2, 1]), "head_count_kv"),
    "a larger head": (each(key("attention.key_length", 16), key("attention.value_length", 16)), ""),
    "another embedding_length": (key("embedding_length", 48), ""),
    "another feed_forward_length": (key("feed_forward_length", 40), ""),
    "a text for a size": (key("block_count", "two"), "m.gguf"),
    "another architecture": (lambda p: p.metadata.update({ARCHITECTURE: "qwen2"}), "m.gguf"),
    "an unknown architecture": (lambda p: p.metadata.update({ARCHITECTURE: "spice"}), "spice"),
    "one of two parts": (lambda p: p.metadata.update({"split.count": 2, "split.no": 0}), "m.gguf is one of 2 parts"),
    "scaling of an unknown type": (key(f"{SCALING}.type", "spiral"), "spiral"),
    "longrope without factors": (key(f"{SCALING}.type", "longrope"), "longrope"),
    "short factors alone": (_new_tensor("rope_factors_short.weight", np.ones(4)), "rope_factors"),
    "frequencies of another number": (_new_tensor("rope_freqs.weight", np.ones(3)), "frequencies"),
    "experts in a plain model": (key("expert_count", 8), "expert"),
    "capped scores": (key("attn_logit_softcapping", 5.0), "attn_logit_softcapping"),
    "a scale by position": (key("attention.temperature_scale", 0.1), "attention.temperature_scale"),
    "scaled outputs of attention": (key("attention.output_scale", 0.5), "attention.output_scale"),
    "a pattern of windows": (key(PATTERN, 2), PATTERN),
    "no epsilon": (key(EPSILON, None), EPSILON),
    "an epsilon below 0": (key(EPSILON, -1e-5), EPSILON),
    "a base of 0": (key("rope.freq_base", 0.0), "rope.freq_base"),
    "a factor below 0": (key(f"{SCALING}.factor", -2.0), f"{SCALING}.factor"),
    "more tokens than embeddings": (_tokens(lambda t: [*t, *(f"more{i}" for i in range(20))]), "lists 287 tokens"),
    "many more tokens": (_tokens(lambda t: [*t, *(f"more{i}" for i in range(2000))]), "lists 2267 tokens"),
    "no matrix of queries": (_tensor("blk.0.attn_q.weight", None), "q_proj"),
    "no last norm": (_tensor("output_norm.weight", None), "norm.weight"),
    "no table": (_tensor("token_embd.weight", None), "token_embd.weight"),
    "an unknown tensor": (_new_tensor("blk.0.spice.weight", np.ones(4)), "spice"),
    "one block more": (_new_tensor("blk.2.attn_norm.weight", np.ones(32)), "blk.2"),
    "a norm of another size": (_tensor("output_norm.weight", lambda t: t[:-1]), "norm.weight"),
    "a bias of one block alone": (_new_tensor("blk.1.attn_q.bias", np.ones(32)), "q_proj.bias"),
    "a tensor twice": (_replaced(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"), "m.gguf"),
    "a key twice": (
        each(
            lambda p: p.metadata.update({"general.spice_a": 1, "general.spice_b": 2}),
            _replaced(b"general.spice_b", b"general.spice_a"),
        ),
        "m.gguf",
    ),
    "another magic": (_replaced(b"GGUF", b"GGML"), "m.gguf"),
    "version 1": (_replaced(b"GGUF\x03", b"GGUF\x01"), "m.gguf"),
    "version 9": (_replaced(b"GGUF\x03", b"GGUF\x09"), "m.gguf"),
    **{f"cut after {length} bytes": (_cut(length), "m.gguf") for length in (0, 3, 20, 200, 4000, 12000, 60000)},
    "cut by a byte": (_cut(-1), "m.gguf"),
    "a text": (each(_cut(0), lambda p: setattr(p, "behind", b"<html></html>")), "m.gguf"),
}
TOKENS: dict[str, Case] = {
    "as they are": (lambda _: None, None),
    "an unknown key": (ggml("spice", "x"), None),
    "scores": (ggml("scores", [0.0] * 267), None),
    "no tokens": (ggml("tokens", None), "tokenizer.ggml.tokens"),
    "numbers for tokens": (ggml("tokens", [1, 2]), "tokenizer.ggml.tokens"),
    "no types": (ggml("token_type", None), "tokenizer.ggml.token_type"),
    "fewer types": (ggml("token_type", [1] * 9), "token types"),
    "texts for types": (ggml("token_type", ["1"] * 267), "tokenizer.ggml.token_type"),
    "a token twice": (_tokens(lambda t: [*t[:259], t[258], *t[260:]]), "tokens are"),
    "a byte that no token is": (_tokens(lambda t: ["aa" if token == "a" else token for token in t]), "0x61"),
    "no merges": (ggml("merges", None), "tokenizer.ggml.merges"),
    "numbers for merges": (ggml("merges", [1, 2]), "tokenizer.ggml.merges"),
    "a merge of one token": (_merges(lambda m: [*m, "ab"]), "merge 'ab'"),
    "an empty merge": (_merges(lambda m: [*m, ""]), "merge ''"),
    "a merge of an unknown token": (_merges(lambda m: [*m, "hell q"]), "merge 'hell q'"),
    "a merge into an unknown token": (_merges(lambda m: [*m, "a a"]), "merge 'a a'"),
    "bos beyond the tokens": (ggml("bos_token_id", 999), "bos_token_id 999"),
    "eos of 32 ones": (ggml("eos_token_id", 2**32 - 1), "eos_token_id"),
    "a text for bos": (ggml("bos_token_id", "<s>"), "bos_token_id"),
    "a number for add_bos_token": (ggml("add_bos_token", 1), "add_bos_token"),
    "no pre": (ggml("pre", None), "pre-tokenizer"),
    "pre default": (ggml("pre", "default"), "pre-tokenizer"),
    "an unknown pre": (ggml("pre", "spice"), "spice"),
    "SentencePiece's name": (ggml("model", "llama"), "<0x00>"),
    "word pieces": (ggml("model", "bert"), "--tokenizer-path"),
    "no model": (ggml("model", None), "--tokenizer-path"),
    "a number for the template": (lambda p: p.metadata.update({"tokenizer.chat_template": 5}), "chat_template"),
}


def with_layers(*types: str) -> Callable[[str], torch.nn.Module]:
    """Return what makes a base's model with other ``layer_types``."""

    def make(base: str) -> torch.nn.Module:
        model = make_model(base)
        config = copy.deepcopy(model.config)
        config.layer_types = [f"{kind}_attention" for kind in types]
        other = type(model)(config)
        other.load_state_dict(model.state_dict())
        return other.eval()

    return make


WINDOWS: dict[str, tuple[Edit, Callable[[str], torch.nn.Module]]] = {
    "the family's": (lambda _: None, make_model),
    "the same": (key(PATTERN, 2), make_model),
    "another": (key(PATTERN, 1), with_layers("full", "full")),
    "0": (key(PATTERN, 0), with_layers("sliding", "sliding")),
    "a list": (key(PATTERN, [False, True]), with_layers("full", "sliding")),
}
"""Patterns of windows in a GPT-OSS."""


def _without_bos(texts: Texts) -> Texts:
    pairs = [ids for plain in texts.ids[1::2] for ids in (plain, plain)]
    shown = [text for plain in texts.shown[1::2] for text in (plain, plain)]
    return texts._replace(ids=pairs, shown=shown)


def gguf_variants() -> Iterator[GGUFVariant]:
    """Yield the variants of GGUF files."""
    for base in ("llama", "qwen3"):
        for name, (edit, reference) in SERVED.items():
            yield GGUFVariant(f"{base}, GGUF: {name}", base, edit, reference=reference)
        for name, (edit, refusal) in REFUSED.items():
            yield GGUFVariant(f"{base}, GGUF: {name}", base, edit, refusal=refusal)
    for name, (edit, reference) in WINDOWS.items():
        yield GGUFVariant(f"gpt_oss, GGUF: windows, pattern {name}", "gpt_oss", edit, reference=reference)
    head = _tensor("output.weight", None)
    yield GGUFVariant("llama, GGUF: no head", "llama", head, reference=with_tied_head)
    table = lambda p: p.tensors.update({"output.weight": p.tensors["token_embd.weight"]})  # noqa: E731
    yield GGUFVariant("qwen3, GGUF: a head that is the table", "qwen3", table)
    for name, (edit, refusal) in TOKENS.items():
        yield GGUFVariant(f"llama, GGUF tokens: {name}", "llama", edit, TEXT, refusal=refusal)
    for name, edit in {"false": ggml("add_bos_token", False), "missing": ggml("add_bos_token", None)}.items():
        name = f"llama, GGUF tokens: add_bos_token {name}"
        yield GGUFVariant(name, "llama", edit, TEXT, texts=_without_bos)
