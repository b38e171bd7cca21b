"""Our names of a model's tensors, and the checkpoint's tensors that contain them.

Ours are ``embed_tokens.weight``, ``norm.weight``, ``lm_head.weight``, and for each layer names like
``layers.3.q_proj.weight``:

- the linear layers q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj, some with a ``.bias``;
- the norms q_norm, k_norm, before_attention, after_attention, before_mlp and after_mlp;
- ``layers.3.sinks``, a score for each head;
- for latent attention q_a_proj and q_b_proj (or only q_proj), kv_a_proj, k_b_proj, v_b_proj, q_a_norm and kv_a_norm;
- for experts instead of an MLP a router, some with ``router.choice_bias``, and names like ``experts.7.gate_proj``;
- for a shared expert names like ``shared.gate_proj``, some with a shared_gate.

Checkpoints have other names. Some put several of our tensors into one, one below the other or expert by expert, as
``ModelSpec.tensors`` says.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .spec import ExpertsSpec, LayerSpec, MLASpec, ModelSpec, Stack

EMBEDDING = "embed_tokens.weight"
NORM = "norm.weight"
HEAD = "lm_head.weight"

HF_LINEAR: dict[str, tuple[str, ...] | Stack] = {
    "self_attn.q_proj": ("q_proj",),
    "self_attn.k_proj": ("k_proj",),
    "self_attn.v_proj": ("v_proj",),
    "self_attn.o_proj": ("o_proj",),
    "self_attn.q_norm": ("q_norm",),
    "self_attn.k_norm": ("k_norm",),
    "mlp.gate_proj": ("gate_proj",),
    "mlp.up_proj": ("up_proj",),
    "mlp.down_proj": ("down_proj",),
}
"""Names in a layer of Hugging Face that all families have in common."""
HF_FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
HF_LATENT = {
    "self_attn.q_a_proj": ("q_a_proj",),
    "self_attn.q_a_layernorm": ("q_a_norm",),
    "self_attn.q_b_proj": ("q_b_proj",),
    "self_attn.kv_a_proj_with_mqa": ("kv_a_proj",),
    "self_attn.kv_a_layernorm": ("kv_a_norm",),
    "self_attn.kv_b_proj": ("k_b_proj", "v_b_proj"),
}
"""Names of latent attention; ``model_runner/loader/latent.py`` explains the last one."""
HF_LLAMA = HF_LINEAR | {"input_layernorm": ("before_attention",), "post_attention_layernorm": ("before_mlp",)}
HF_EXPERTS: dict[str, tuple[str, ...] | Stack] = {
    "mlp.gate": ("router",),
    "mlp.gate.e_score_correction_bias": ("router.choice_bias",),
    "mlp.experts.*.gate_proj": ("experts.*.gate_proj",),
    "mlp.experts.*.up_proj": ("experts.*.up_proj",),
    "mlp.experts.*.down_proj": ("experts.*.down_proj",),
    "mlp.experts.gate_up_proj": Stack(("gate_proj.weight", "up_proj.weight")),
    "mlp.experts.down_proj": Stack(("down_proj.weight",)),
}
"""The experts one by one, as files are published, or all in one tensor, as transformers has them in memory."""

GGUF_LAYER: dict[str, tuple[str, ...] | Stack] = {
    "attn_q": ("q_proj",),
    "attn_k": ("k_proj",),
    "attn_v": ("v_proj",),
    "attn_qkv": ("q_proj", "k_proj", "v_proj"),
    "attn_output": ("o_proj",),
    "attn_q_norm": ("q_norm",),
    "attn_k_norm": ("k_norm",),
    "ffn_gate": ("gate_proj",),
    "ffn_up": ("up_proj",),
    "ffn_down": ("down_proj",),
    "attn_norm": ("before_attention",),
    "post_attention_norm": ("after_attention",),
    "ffn_norm": ("before_mlp",),
    "post_ffw_norm": ("after_mlp",),
}
GGUF_LATENT = {
    "attn_q_a": ("q_a_proj",),
    "attn_q_a_norm": ("q_a_norm",),
    "attn_q_b": ("q_b_proj",),
    "attn_kv_a_mqa": ("kv_a_proj",),
    "attn_kv_a_norm": ("kv_a_norm",),
    "attn_kv_b": ("k_b_proj", "v_b_proj"),
    "attn_k_b": ("k_b_proj",),
    "attn_v_b": ("v_b_proj",),
}
GGUF_FUSED_UP = GGUF_LAYER | {"ffn_up": ("gate_proj", "up_proj")}
GGUF_EXPERTS: dict[str, tuple[str, ...] | Stack] = {
    "ffn_gate_inp": ("router",),
    "exp_probs_b.bias": ("router.choice_bias",),
    **{
        f"ffn_{part}_exps.{kind}": Stack((f"{part}_proj.{kind}",))
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "ffn_gate_up_exps.weight": Stack(("gate_proj.weight", "up_proj.weight")),
    "ffn_gate_shexp": ("shared.gate_proj",),
    "ffn_up_shexp": ("shared.up_proj",),
    "ffn_down_shexp": ("shared.down_proj",),
    "ffn_gate_inp_shexp": ("shared_gate",),
}

_GLOBAL = {
    "embed_tokens.weight": EMBEDDING,
    "norm.weight": NORM,
    "lm_head.weight": HEAD,
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": NORM,
    "output.weight": HEAD,
}
# Around the text's part of a model of several kinds of input, there is one more name.
_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
_LAYER = re.compile(r"(?:layers|blk)\.(\d+)\.(.+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NOT_READ = re.compile(r"rotary_emb\.inv_freq$|^rope_(freqs|factors_long|factors_short)\.weight$")
_NOT_TEXT = re.compile(r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\.")


class Part(NamedTuple):
    """Our tensor ``name`` is ``rows`` rows of a checkpoint's, from ``first`` on every ``step``-th; None: all of them.

    ``expert``: of the matrix of that number, where the checkpoint's is a stack of them, that may be ``transposed``.
    """

    name: str
    first: int = 0
    rows: int | None = None
    step: int = 1
    expert: int | None = None
    transposed: bool = False

    @property
    def where(self) -> slice:
        """Return the slice of the checkpoint tensor's rows that are this part."""
        return slice(self.first, None if self.rows is None else self.first + self.rows * self.step, self.step)


def find_parts(spec: ModelSpec, name: str) -> tuple[Part, ...]:
    """Return our tensors that the checkpoint's tensor ``name`` contains, from top to bottom; () for an unknown name."""
    bare = _PREFIX.sub("", name)
    if bare in _GLOBAL:
        return (Part(_GLOBAL[bare]),)
    found = _LAYER.fullmatch(bare)
    if found is None or int(found[1]) >= spec.num_layers:
        return ()
    start, layer, theirs = f"layers.{found[1]}", spec.layers[int(found[1])], found[2]
    number = _NUMBER.search(theirs)
    key = theirs if number is None else _NUMBER.sub("*", theirs, count=1)
    ours, suffix = spec.tensors.get(key), ""
    if ours is None:
        key, _, kind = key.rpartition(".")
        ours, suffix = spec.tensors.get(key, ()) if kind in ("weight", "bias") else (), f".{kind}"
    if isinstance(ours, Stack):
        return _of_stack(start, layer, ours)
    names = [f"{start}.{part.replace('*', number[0]) if number else part}{suffix}" for part in ours]
    if len(names) == 1:
        return (Part(names[0]),)
    sizes = _sizes(layer)
    parts, first = [], 0
    for part, full in zip(ours, names, strict=True):
        parts.append(Part(full, first, sizes[part]))
        first += sizes[part]
    return tuple(parts)


def is_draft(spec: ModelSpec, name: str) -> bool:
    """Return whether the tensor is of a draft layer: one after the last, which predicts tokens further ahead."""
    found = _LAYER.fullmatch(_PREFIX.sub("", name))
    return found is not None and 0 <= int(found[1]) - spec.num_layers < spec.draft_layers


def is_not_needed(name: str) -> bool:
    """Return whether a checkpoint's tensor can be skipped: it repeats the config, or serves other inputs than text."""
    return bool(_NOT_READ.search(name) or _NOT_TEXT.match(name))


def _of_stack(start: str, layer: LayerSpec, stack: Stack) -> tuple[Part, ...]:
    experts = layer.mlp
    if not isinstance(experts, ExpertsSpec):
        return ()
    count = len(stack.parts)
    # Several are a gate and what it is multiplied by: of one size.
    rows = None if count == 1 else experts.inner
    step = count if stack.interleaved else 1
    return tuple(
        Part(
            f"{start}.experts.{expert}.{part}",
            first=i if stack.interleaved else i * (rows or 0),
            rows=rows,
            step=step,
            expert=expert,
            transposed=stack.transposed,
        )
        for expert in range(experts.count)
        for i, part in enumerate(stack.parts)
    )


def _sizes(layer: LayerSpec) -> dict[str, int]:
    attention = layer.attention
    if isinstance(attention, MLASpec):
        heads = attention.heads
        return {"k_b_proj": heads * attention.qk_nope_head_dim, "v_b_proj": heads * attention.v_head_dim}
    kv_size = attention.kv_heads * attention.head_dim
    return {
        "q_proj": attention.heads * attention.head_dim,
        "k_proj": kv_size,
        "v_proj": kv_size,
        "gate_proj": layer.mlp.inner,
        "up_proj": layer.mlp.inner,
    }
