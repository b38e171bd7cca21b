"""The CPU engine on all that a ``ModelSpec`` can say, against the same written out in float64, and against itself.

Models are of no family: each is made of the features of some, or drawn at random.

Shapes: T tokens, N hidden size, H heads, K KV heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import mmap
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.experts import ACTIVATIONS, Experts, Kinds, Rounding, draw_experts, run_experts, set_experts
from support.kv_pages import make_pool_layout
from support.native_weights import NativeWeights, TestRopes
from support.sampling import few
from torch import Tensor

from pdserve.model_files.spec import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QKNorm,
    RopeSpec,
)
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.lowering import refusal
from pdserve.model_runner.cpu_engine.native_engine import WHOLE, NativeEngine, NormKind, Ranks, VectorKind
from pdserve.model_runner.cpu_engine.structs import WeightPart
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.cpu_engine.weight_packer import LinearKind, WeightPacker
from pdserve.model_runner.dtypes import dtype_name
from pdserve.model_runner.kv.pool import MHATokenToKVPool

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

PAGE, CONTEXT, ROWS = 16, 448, 4
# (row, start, q_len): prompts, steps beside them, a chunk of a prompt, a context that is split along its keys.
PASSES = (
    [(0, 0, 5), (1, 0, 1)],
    [(0, 5, 1), (1, 1, 1), (2, 0, 9)],
    [(3, 0, 330), (0, 6, 1)],
    [(3, 330, 70), (0, 7, 1), (1, 2, 40)],
    [(3, 400, 1)],
    [(row, start, 1) for row, start in ((0, 8), (1, 42), (2, 9), (3, 401))],
)
NORM = NormSpec(eps=1e-5)
ATTENTION = AttentionSpec(heads=4, kv_heads=2, head_dim=32, scale=32**-0.5)
LAYER = LayerSpec(attention=ATTENTION, mlp=MLPSpec(inner=70), before_attention=NORM, before_mlp=NORM)


def make_spec(*layers: LayerSpec, ropes: tuple[RopeSpec, ...] = (RopeSpec(rotary_dim=32),), **changes) -> ModelSpec:
    fields = {"vocab_size": 61, "hidden_size": 90, "context_length": CONTEXT, "tied_head": True} | changes
    return ModelSpec(family="test", layers=layers, final_norm=NORM, ropes=ropes, **fields)


def attention(**changes) -> AttentionSpec:
    return replace(ATTENTION, **changes)


WINDOWED = replace(LAYER, attention=attention(window=37, softcap=5.0, scale=0.3))
POST_NORMS = {"after_attention": NORM, "after_mlp": NormSpec(eps=1e-2)}
GELU = MLPSpec(inner=70, activation=Activation.GELU, bias=True)
SPECS = {
    "plain": make_spec(LAYER, LAYER),
    "norms behind and none before": make_spec(
        *[replace(LAYER, before_attention=None, before_mlp=None, **POST_NORMS)] * 2
    ),
    "norms on both sides": make_spec(*[replace(LAYER, **POST_NORMS, residual_scale=0.6)] * 2),
    "norms of all heads": make_spec(
        *[replace(LAYER, attention=attention(qk_norm=QKNorm.ALL, qk_norm_spec=NormSpec(eps=1e-3)))] * 2
    ),
    "windows, caps and scales": make_spec(
        replace(WINDOWED, mlp=MLPSpec(inner=70, activation=Activation.GELU_TANH)),
        replace(LAYER, attention=attention(softcap=2.0)),
        replace(WINDOWED, attention=attention(window=300)),
        embedding_scale=3.3,
        logit_softcap=1.5,
    ),
    "several ropes and none": make_spec(
        replace(LAYER, attention=attention(rope=1)),
        replace(LAYER, attention=attention(rope=None)),
        replace(LAYER, attention=attention(rope=2, qk_norm=QKNorm.HEAD, qk_norm_spec=NORM)),
        LAYER,
        ropes=(RopeSpec(rotary_dim=32), RopeSpec(rotary_dim=32, theta=500.0), RopeSpec(rotary_dim=8)),
    ),
    "scales": make_spec(
        replace(LAYER, residual_scale=0.22), replace(LAYER, residual_scale=1.7), embedding_scale=12.0, logit_scale=0.125
    ),
    "biases and gelu": make_spec(*[replace(LAYER, attention=attention(qkv_bias=True, o_bias=True), mlp=GELU)] * 2),
    "sinks": make_spec(
        replace(LAYER, attention=attention(sinks=True)), replace(WINDOWED, attention=attention(sinks=True, window=37))
    ),
    "networks of different sizes": make_spec(LAYER, *[replace(LAYER, mlp=MLPSpec(inner=i)) for i in (2, 150, 48)]),
}


def random_spec(seed: int) -> ModelSpec:
    """Draw a spec with any features together, and sizes that are no multiples of anything."""
    rng = random.Random(seed)
    kv_heads, dim = rng.randint(1, 3), rng.choice([16, 32, 48, 64, 96])
    heads, ropes = kv_heads * rng.randint(1, 4), rng.randint(1, 3)

    def norm(maybe: float = 0.5) -> NormSpec | None:
        return NormSpec(eps=10 ** rng.uniform(-6, -2)) if rng.random() < maybe else None

    def layer() -> LayerSpec:
        qk_norm = rng.choice([None, None, QKNorm.HEAD, QKNorm.ALL])
        return LayerSpec(
            attention=AttentionSpec(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=dim,
                scale=rng.uniform(0.3, 1.5) * dim**-0.5,
                rope=rng.choice([None, *range(ropes)]),
                window=rng.choice([None, 1, 20, 128, 129, 280]),
                softcap=rng.choice([None, 4.0]),
                qkv_bias=rng.random() < 0.5,
                o_bias=rng.random() < 0.5,
                qk_norm=qk_norm,
                qk_norm_spec=None if qk_norm is None else norm(1.0),
                sinks=rng.random() < 0.3,
            ),
            mlp=MLPSpec(inner=2 * rng.randint(1, 80), activation=rng.choice(list(Activation)), bias=rng.random() < 0.5),
            before_attention=norm(0.7),
            before_mlp=norm(0.7),
            after_attention=norm(),
            after_mlp=norm(),
            residual_scale=rng.choice([1.0, 0.4]),
        )

    return make_spec(
        *[layer() for _ in range(rng.randint(1, 4))],
        ropes=tuple(RopeSpec(rotary_dim=dim, theta=rng.choice([100.0, 10000.0])) for _ in range(ropes)),
        vocab_size=rng.randint(20, 80),
        hidden_size=2 * rng.randint(8, 70),
        embedding_scale=rng.choice([1.0, 2.5]),
        logit_scale=rng.choice([1.0, 0.3]),
        logit_softcap=rng.choice([None, 2.0]),
    )


ALL = SPECS | {f"random {seed}": random_spec(seed) for seed in range(16)}


class LayerTensors(NamedTuple):
    linears: dict[LinearKind, tuple[Tensor, Tensor | None]]
    norms: dict[NormKind, Tensor]
    sinks: Tensor | None = None
    experts: Experts | None = None


class Model(NamedTuple):
    """Weights of ``spec``; those of linear layers and the embedding, which is the head too, are of one type."""

    spec: ModelSpec
    embedding: Tensor
    layers: list[LayerTensors]
    final_norm: Tensor


def make_model(spec: ModelSpec, dtype: torch.dtype, kinds: Kinds = (None, None)) -> Model:
    """Draw a model's weights. ``kinds``: kinds of the experts' blocks, see ``draw_experts``."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def linear(out: int, size: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        return (draw(out, size) / math.sqrt(size)).to(dtype), draw(out) * 0.3 if bias else None

    def make_layer(layer: LayerSpec) -> LayerTensors:
        a, hidden, inner = layer.attention, spec.hidden_size, layer.mlp.inner
        linears = {
            LinearKind.QKV: linear((a.heads + 2 * a.kv_heads) * a.head_dim, hidden, a.qkv_bias),
            LinearKind.O: linear(hidden, a.heads * a.head_dim, a.o_bias),
        }
        if isinstance(layer.mlp, MLPSpec):
            linears[LinearKind.GATE_UP] = linear(2 * inner, hidden, layer.mlp.bias)
            linears[LinearKind.DOWN] = linear(hidden, inner, layer.mlp.bias)
        every = a.qk_norm == QKNorm.ALL
        sizes = {
            NormKind.BEFORE_ATTENTION: hidden * (layer.before_attention is not None),
            NormKind.AFTER_ATTENTION: hidden * (layer.after_attention is not None),
            NormKind.BEFORE_MLP: hidden * (layer.before_mlp is not None),
            NormKind.AFTER_MLP: hidden * (layer.after_mlp is not None),
            NormKind.Q: a.head_dim * (a.heads if every else 1) * (a.qk_norm is not None),
            NormKind.K: a.head_dim * (a.kv_heads if every else 1) * (a.qk_norm is not None),
        }
        norms = {kind: 1 + draw(size) * 0.2 for kind, size in sizes.items() if size}
        sinks = draw(a.heads) if a.sinks else None
        of = layer.mlp
        experts = draw_experts(of, hidden, generator, dtype, kinds) if isinstance(of, ExpertsSpec) else None
        return LayerTensors(linears, norms, sinks, experts)

    embedding = draw(spec.vocab_size, spec.hidden_size).to(dtype)
    return Model(spec, embedding, [make_layer(layer) for layer in spec.layers], 1 + draw(spec.hidden_size) * 0.2)


# --- in float64 ---


def angles_of(rope: RopeSpec, dim: int, positions: Tensor) -> Tensor:
    """Return the angles [T, dim / 2]. Pairs beyond the rotated ones have the angle 0."""
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float64)
    frequencies = F.pad(rope.theta ** (-2 * pairs / rope.rotary_dim), (0, (dim - rope.rotary_dim) // 2))
    return positions[:, None].double() * frequencies


def normalise(x: Tensor, spec: NormSpec | None, weight: Tensor | None) -> Tensor:
    if spec is None or weight is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight.double()


def rotate(x_THD: Tensor, angles: Tensor) -> Tensor:
    a, b = x_THD.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def multiply(x: Tensor, weight: tuple[Tensor, Tensor | None]) -> Tensor:
    return F.linear(x, weight[0].double(), None if weight[1] is None else weight[1].double())


def attend(spec: AttentionSpec, x: Tensor, layer: LayerTensors, ropes: tuple[RopeSpec, ...]) -> Tensor:
    count = len(x)
    sizes = [heads * spec.head_dim for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]
    q, k, v = multiply(x, layer.linears[LinearKind.QKV]).split(sizes, -1)
    if spec.qk_norm == QKNorm.ALL:
        q = normalise(q, spec.qk_norm_spec, layer.norms[NormKind.Q])
        k = normalise(k, spec.qk_norm_spec, layer.norms[NormKind.K])
    q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in (q, k, v))
    if spec.qk_norm == QKNorm.HEAD:
        q = normalise(q, spec.qk_norm_spec, layer.norms[NormKind.Q])
        k = normalise(k, spec.qk_norm_spec, layer.norms[NormKind.K])
    if spec.rope is not None:
        angles = angles_of(ropes[spec.rope], spec.head_dim, torch.arange(count))
        q, k = rotate(q, angles), rotate(k, angles)
    k, v = (part.repeat_interleave(spec.heads // spec.kv_heads, 1) for part in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    age = torch.arange(count)[:, None] - torch.arange(count)
    scores.masked_fill_((age < 0) | (age >= (spec.window or count)), -torch.inf)
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks.double()[:, None, None].expand(-1, count, 1)), -1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :count], v).flatten(1)


class Exact(NamedTuple):
    """``logits`` [T, V]. ``margin`` [T]: the least by which an expert was chosen."""

    logits: Tensor
    margin: Tensor


def compute_in_float64(model: Model, ids: Tensor, rounding: Rounding = lambda x: x) -> Exact:
    """Compute a text from position 0 on. ``rounding`` is applied to what quantised weights are multiplied with."""
    spec, margin = model.spec, torch.full(ids.shape, torch.inf, dtype=torch.float64)
    x = model.embedding[ids].double() * torch.tensor(spec.embedding_scale, dtype=model.embedding.dtype).double()
    for layer, tensors in zip(spec.layers, model.layers, strict=True):
        linears, norms = tensors.linears, tensors.norms
        a = attend(
            layer.attention,
            normalise(x, layer.before_attention, norms.get(NormKind.BEFORE_ATTENTION)),
            tensors,
            spec.ropes,
        )
        a = normalise(multiply(a, linears[LinearKind.O]), layer.after_attention, norms.get(NormKind.AFTER_ATTENTION))
        x = x + layer.residual_scale * a
        m = normalise(x, layer.before_mlp, norms.get(NormKind.BEFORE_MLP))
        if tensors.experts is not None:
            m, choice = run_experts(tensors.experts, m, rounding)
            margin = torch.minimum(margin, choice.margin)
        else:
            gate, up = multiply(m, linears[LinearKind.GATE_UP]).chunk(2, -1)
            m = multiply(ACTIVATIONS[layer.mlp.activation](gate) * up, linears[LinearKind.DOWN])
        x = x + layer.residual_scale * normalise(m, layer.after_mlp, norms.get(NormKind.AFTER_MLP))
    logits = F.linear(normalise(x, spec.final_norm, model.final_norm), model.embedding.double()) * spec.logit_scale
    cap = spec.logit_softcap
    return Exact(logits if cap is None else cap * torch.tanh(logits / cap), margin)


# --- by the engine ---


class Engine:
    """The engine of ``model``, rows on scattered pages, and ids that position and row determine."""

    @staticmethod
    def make_pool(spec: ModelSpec, dtype: torch.dtype, file: Path | None = None) -> MHATokenToKVPool:
        layout = make_pool_layout(PAGE, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, "blocks")
        buffer = None
        if file is not None:
            with file.open("r+b") as opened:
                buffer = mmap.mmap(opened.fileno(), 0)
        return MHATokenToKVPool(layout, ROWS * CONTEXT // PAGE + 1, torch.device("cpu"), buffer)

    def __init__(self, model: Model, threads: int, pool: MHATokenToKVPool | None = None, ranks: Ranks = WHOLE) -> None:
        spec, dtype = model.spec, model.embedding.dtype
        pool = pool or self.make_pool(spec, dtype)
        pages = torch.randperm(ROWS * CONTEXT // PAGE, generator=torch.Generator().manual_seed(1)) + 1
        self._table = (pages[:, None] * PAGE + torch.arange(PAGE)).view(ROWS, CONTEXT).int()
        ropes = TestRopes([angles_of(rope, spec.head_dim, torch.arange(CONTEXT)) for rope in spec.ropes])
        self._vocab, self.ranks = spec.vocab_size, ranks
        team, name, vocab = Team(threads), dtype_name(dtype), None if ranks.shard is None else ranks.shard.vocab
        self._engine = NativeEngine(spec, dtype, ropes, [pool], team, ranks)
        weights = NativeWeights(self._engine, WeightPacker(spec, name, name, team, vocab))
        self._weights = weights
        for i, layer in enumerate(model.layers):
            for kind, (weight, bias) in layer.linears.items():
                weights.set_linear(kind, i, [WeightPart(weight.data_ptr(), len(weight), 0)], bias)
            for norm, weight in layer.norms.items():
                weights.set_norm(norm, i, weight)
            if layer.sinks is not None:
                weights.set_vector(VectorKind.SINKS, i, layer.sinks)
            if layer.experts is not None:
                set_experts(weights, i, layer.experts)
        weights.set_norm(NormKind.FINAL, 0, model.final_norm)
        rows = model.embedding
        if ranks.shard is not None:
            rows = rows[ranks.shard.vocab.begin : ranks.shard.vocab.end]
        head = [WeightPart(rows.data_ptr(), len(rows), 0)]
        weights.set_linear(LinearKind.HEAD, 0, head, None)
        weights.set_embedding(model.embedding)

    def weight_bytes_read(self) -> dict[LinearKind, int]:
        return self._engine.weight_bytes_read()

    def ids(self, row: int, positions: Tensor) -> Tensor:
        return (positions * 31 + row * 7) % self._vocab

    def batch(self, entries: list[tuple[int, int, int]]) -> ForwardBatch:
        """Make the batch of one pass, which wants the logits of every token."""
        rows, starts, q_lens = (list(column) for column in zip(*entries, strict=True))
        positions = torch.cat([torch.arange(start, start + q_len) for _, start, q_len in entries])
        row_of_token = torch.repeat_interleave(torch.tensor(rows), torch.tensor(q_lens))
        return ForwardBatch(
            input_ids=torch.cat([self.ids(row, torch.arange(start, start + n)) for row, start, n in entries]),
            positions=positions,
            out_cache_loc=self._table[row_of_token, positions].long(),
            rows=torch.tensor(rows),
            starts=starts,
            q_lens=q_lens,
            req_to_token=self._table,
            logit_indices=torch.arange(len(positions)),
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute a pass; see ``NativeEngine.forward``."""
        return torch.from_numpy(self._engine.forward(batch.on_host()))

    def run(self, entries: list[tuple[int, int, int]]) -> dict[tuple[int, int], Tensor]:
        """Return the logits [V] of every token of one pass, by row and position."""
        places = [(row, start + i) for row, start, count in entries for i in range(count)]
        return dict(zip(places, self.forward(self.batch(entries)), strict=True))


def run_all(engine: Engine, passes: list[list[tuple[int, int, int]]] | tuple) -> dict[tuple[int, int], Tensor]:
    found: dict[tuple[int, int], Tensor] = {}
    for entries in passes:
        found |= engine.run(entries)
    return found


def compute_exactly(
    model: Model, engine: Engine, places: list[tuple[int, int]], rounding: Rounding = lambda x: x
) -> Exact:
    """Compute the tokens at ``places`` in float64, one row each."""
    longest: dict[int, int] = {}
    for row, position in places:
        longest[row] = max(longest.get(row, 0), 1 + position)
    by_row = {row: compute_in_float64(model, engine.ids(row, torch.arange(n)), rounding) for row, n in longest.items()}
    return Exact(*(torch.stack([by_row[row][i][position] for row, position in places]) for i in range(2)))


def exact_logits(model: Model, engine: Engine, places: list[tuple[int, int]]) -> Tensor:
    return compute_exactly(model, engine, places).logits


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("input_ids", 61, "token ids"),
        ("input_ids", -1, "token ids"),
        ("out_cache_loc", ROWS * CONTEXT + PAGE, "slots"),
        ("positions", CONTEXT, "positions"),
        ("rows", ROWS, "rows"),
        ("logit_indices", 5, "logit indices"),
    ],
)
def test_a_place_outside_of_the_engines_memory_is_refused(field: str, value: int, what: str) -> None:
    engine = Engine(make_model(SPECS["plain"], torch.float32), 1)
    batch = engine.batch([(0, 0, 5)])
    engine.forward(batch)
    getattr(batch, field)[-1] = value
    with pytest.raises(IndexError, match=f"^{what} reach from"):
        engine.forward(batch)


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", few(ALL))
def test_float32_is_float64_but_for_rounding(name: str, threads: int) -> None:
    model = make_model(ALL[name], torch.float32)
    assert refusal(model.spec, torch.float32, torch.float32) is None
    engine = Engine(model, threads)
    found = run_all(engine, PASSES)
    exact = exact_logits(model, engine, list(found))
    torch.testing.assert_close(torch.stack(list(found.values())).double(), exact, rtol=2e-4, atol=2e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", few(ALL))
def test_bfloat16_is_near(name: str, threads: int) -> None:
    model = make_model(ALL[name], torch.bfloat16)
    engine = Engine(model, threads)
    found = run_all(engine, PASSES)
    exact = exact_logits(model, engine, list(found))
    noise = (torch.stack(list(found.values())).double() - exact).square().mean() / exact.square().mean()
    assert noise < 1e-3


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", few(ALL))
def test_a_token_depends_on_its_text_alone_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    """Not on its batch, the number of threads, or how its text is cut."""
    model = make_model(ALL[name], dtype)
    together = run_all(Engine(model, 2), PASSES)
    alone = run_all(Engine(model, 3), [[entry] for entries in PASSES for entry in entries])
    cuts = [0, 1, 2, 60, 190, 300, 399, 400, 402]
    chunks = [[(3, begin, end - begin)] for begin, end in itertools.pairwise(cuts)]
    cut = run_all(Engine(model, 1), chunks)
    for place, logits in together.items():
        assert torch.equal(alone[place], logits), place
        assert place not in cut or torch.equal(cut[place], logits), place
    assert len(cut) == cuts[-1]
