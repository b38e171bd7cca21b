"""The CPU kernels on drawn cases of odd sizes; ``make test-sanitizers`` runs all of them under a sanitizer.

Models are compared with the torch decoder, which shares nothing with the engine but the spec.

Shapes: T tokens, N outputs, K inputs, V vocabulary.
"""

from __future__ import annotations

import os
import random
from itertools import pairwise
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from support.host_models import host_model
from support.sampler_reference import make_row
from support.sampling import few
from torch import Tensor

from pdserve.model_files.spec import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    QKNorm,
    RopeSpec,
)
from pdserve.model_runner.attention.torch_backend import TorchAttention
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.cpu_engine.lowering import refusal
from pdserve.model_runner.cpu_engine.native_model import NativeModel
from pdserve.model_runner.cpu_engine.packed_model import PackedModel, PackedModelWriter
from pdserve.model_runner.cpu_engine.single_kernels import PackedWeight
from pdserve.model_runner.cpu_engine.team import Team
from pdserve.model_runner.cpu_engine.weight_memory import make_memory, take_memory
from pdserve.model_runner.cpu_engine.weight_packer import WeightPacker
from pdserve.model_runner.dtypes import dtype_name
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import KVPool, make_pool
from pdserve.model_runner.loader.host_weights import HostWeights
from pdserve.model_runner.loader.quantized_blocks import FORMATS
from pdserve.model_runner.models.decoder import Decoder
from pdserve.model_runner.sampling.native import NativeSampler
from pdserve.model_runner.sampling.rows import host_rows
from pdserve.model_runner.sampling.rules import sample
from pdserve.model_runner.weights_cache.model_packer import ModelPacker

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

CPU = torch.device("cpu")
NORM = NormSpec(eps=1e-5)
ROWS, TOKENS = 5, 768
SEEDS = [f"random {seed}" for seed in range(40)]


# --- models ---


def draw_attention(rng: random.Random) -> AttentionSpec:
    kv_heads, dim = rng.choice([1, 2, 3, 5]), rng.choice([16, 32, 48, 64, 80, 96, 128, 256])
    qk_norm = rng.choice([None, None, QKNorm.HEAD, QKNorm.ALL])
    return AttentionSpec(
        heads=kv_heads * rng.choice([1, 2, 3, 4, 7, 13]),
        kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5 * rng.choice([1, 3]),
        qk_norm=qk_norm,
        qk_norm_spec=None if qk_norm is None else NORM,
    )


def draw_latent(rng: random.Random) -> MLASpec:
    return MLASpec(
        heads=rng.choice([1, 2, 3, 5, 17]),
        q_lora_rank=rng.choice([None, 6, 34]),
        kv_lora_rank=rng.choice([16, 48, 64]),
        qk_nope_head_dim=rng.choice([2, 10, 32]),
        qk_rope_head_dim=rng.choice([16, 32, 64]),
        v_head_dim=rng.choice([4, 12, 32]),
        scale=0.2,
        norm=NORM,
    )


def vary(rng: random.Random, drawn: AttentionSpec | MLASpec) -> AttentionSpec | MLASpec:
    """Return a layer's attention, of the sizes that all layers share."""
    if isinstance(drawn, MLASpec):
        return drawn
    return AttentionSpec(
        heads=drawn.heads,
        kv_heads=drawn.kv_heads,
        head_dim=drawn.head_dim,
        scale=drawn.scale,
        rope=rng.choice([0, 0, 0, None]),
        window=rng.choice([None, None, 1, 2, 5, 17, 128, 129, 200]),
        softcap=rng.choice([None, None, 5.0]),
        qkv_bias=rng.random() < 0.3,
        o_bias=rng.random() < 0.3,
        qk_norm=drawn.qk_norm,
        qk_norm_spec=drawn.qk_norm_spec,
        sinks=rng.random() < 0.3,
    )


def draw_spec(rng: random.Random) -> ModelSpec:
    attention = draw_latent(rng) if rng.random() < 0.2 else draw_attention(rng)

    def draw_layer() -> LayerSpec:
        inner = rng.choice([2, 6, 30, 34, 64, 90, 130])
        mlp: MLPSpec | ExpertsSpec = MLPSpec(
            inner=inner, activation=rng.choice(list(Activation)), bias=rng.random() < 0.3
        )
        if rng.random() < 0.3:
            # One of them: which of two equal scores is chosen is another question.
            shared = MLPSpec(inner=rng.choice([2, 50])) if rng.random() < 0.4 else None
            mlp = ExpertsSpec(count=rng.choice([1, 3, 8, 17]), chosen=1, inner=inner, shared=shared)
        return LayerSpec(
            attention=vary(rng, attention),
            mlp=mlp,
            before_attention=NORM,
            before_mlp=NORM,
            after_attention=NORM if rng.random() < 0.2 else None,
            after_mlp=NORM if rng.random() < 0.2 else None,
            residual_scale=rng.choice([1.0, 0.7]),
        )

    layers = tuple(draw_layer() for _ in range(rng.choice([1, 2, 3])))
    rotated = attention.qk_rope_head_dim if isinstance(attention, MLASpec) else attention.head_dim
    return ModelSpec(
        family="fuzz",
        vocab_size=rng.choice([1, 2, 17, 33, 101, 257]),
        hidden_size=rng.choice([2, 6, 18, 34, 62, 64, 94, 160]),
        layers=layers,
        final_norm=NORM,
        ropes=(RopeSpec(rotary_dim=rotated),),
        context_length=1024,
        tied_head=rng.random() < 0.5,
        logit_softcap=rng.choice([None, None, 8.0]),
        embedding_scale=rng.choice([1.0, 2.5]),
    )


Entry = tuple[int, int, int]
"""Row, first position, and number of tokens."""


def draw_passes(rng: random.Random) -> list[list[Entry]]:
    passes, lengths = [], [0] * ROWS
    for _ in range(5):
        entries = []
        for row in rng.sample(range(ROWS), rng.randint(1, ROWS)):
            count = min(rng.choice([1, 1, 1, 2, 5, 9, 100, 130, 260]), TOKENS - lengths[row])
            if count:
                entries.append((row, lengths[row], count))
                lengths[row] += count
        passes.append(entries)
    return [entries for entries in passes if entries]


class Case(NamedTuple):
    """A drawn model, the request table of its rows, and passes over them."""

    spec: ModelSpec
    page: int
    table: Tensor
    passes: list[list[Entry]]

    @classmethod
    def of(cls, rng: random.Random) -> Case:
        """Draw a case."""
        spec, page = draw_spec(rng), rng.choice([1, 2, 4, 8, 16, 32, 64, 128])
        count = ROWS * TOKENS // page
        pages = torch.randperm(count) + 1
        table = (pages[:, None] * page + torch.arange(page)).view(ROWS, TOKENS).int()
        return cls(spec, page, table, draw_passes(rng))

    def model(self, dtype: torch.dtype, seed: int) -> Decoder:
        """Make a model with weights that are drawn from the seed."""
        torch.manual_seed(seed)
        model = Decoder(self.spec, torch.float32, CPU)
        drawn = {
            name: torch.randn_like(weight) * 0.3 + ("norm" in name or "before" in name or "after" in name)
            for name, weight in model.weights().items()
        }
        made = Decoder(self.spec, dtype, CPU)
        for name, weight in made.weights().items():
            weight.copy_(drawn[name])
        return made

    def pool(self, dtype: torch.dtype, order: str) -> KVPool:
        """Make a pool full of NaN, page 0 apart: what no pass has written must not matter."""
        spec = self.spec
        shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.latent_dim)
        pool = make_pool(make_layout(shape, self.page, dtype, order), ROWS * TOKENS // self.page + 1, CPU)
        pool.data[1:] = float("nan") if order == "blocks" else 0.0
        return pool

    def batch(self, entries: list[Entry]) -> ForwardBatch:
        """Make the batch of a pass; all logits are wanted."""
        rows, starts, q_lens = map(list, zip(*entries, strict=True))
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in entries])
        row_of = torch.repeat_interleave(torch.tensor(rows), torch.tensor(q_lens))
        return ForwardBatch(
            input_ids=(positions * 31 + row_of * 7) % self.spec.vocab_size,
            positions=positions,
            out_cache_loc=self.table[row_of, positions].long(),
            rows=torch.tensor(rows),
            starts=starts,
            q_lens=q_lens,
            req_to_token=self.table,
            logit_indices=torch.arange(len(positions)),
        )

    def packed(self, model: Decoder) -> PackedModel:
        """Pack a copy of a model."""
        dtype = model.embed_tokens.dtype
        name = dtype_name(dtype)
        weights = HostWeights(host_model(model), None, "none", None, "fuzz", 0)
        fd = make_memory()
        try:
            writer, packer = PackedModelWriter(fd), WeightPacker(self.spec, name, name, Team(2, spin_us=1))
            writer.finish(ModelPacker(weights, packer, writer).pack("fuzz", "fuzz", TOKENS))
            return PackedModel(take_memory(fd), "fuzz")
        finally:
            os.close(fd)

    def by_engine(
        self, packed: PackedModel, dtype: torch.dtype, threads: int, passes: list[list[Entry]]
    ) -> list[Tensor]:
        """Compute passes on ``threads`` threads."""
        team, pool = Team(threads, spin_us=1), self.pool(dtype, "blocks")
        engine = NativeModel(packed, self.spec, dtype, [pool], team)
        return [torch.from_numpy(engine.forward(self.batch(entries).on_host())) for entries in passes]

    def by_torch(self, model: Decoder) -> list[Tensor]:
        """Compute the passes with the torch decoder."""
        attention, found = TorchAttention([self.pool(torch.float32, "tokens")], torch.float32), []
        for entries in self.passes:
            batch = self.batch(entries)
            attention.plan(batch)
            found.append(model.forward(batch, attention))
        return found


@pytest.mark.parametrize("name", few(SEEDS, 3))
@torch.inference_mode()
def test_models_of_odd_sizes(name: str) -> None:
    seed = int(name.split()[1])
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = Case.of(rng)
    if reason := refusal(case.spec, torch.float32, torch.float32):
        pytest.skip(reason)
    by_torch = case.by_torch(case.model(torch.float32, seed))
    packed = case.packed(case.model(torch.float32, seed))
    alone = case.by_engine(packed, torch.float32, 1, case.passes)
    for found, expected in zip(alone, by_torch, strict=True):
        assert found.isfinite().all()
        assert (found - expected).abs().max() <= 5e-4 * (expected.abs().max() + 1e-6)
    for threads in (2, 5):
        assert all(map(torch.equal, case.by_engine(packed, torch.float32, threads, case.passes), alone))
    assert all(map(torch.equal, in_chunks(case, packed, rng), alone))
    narrow = case.packed(case.model(torch.bfloat16, seed))
    two, five = (case.by_engine(narrow, torch.bfloat16, threads, case.passes) for threads in (2, 5))
    assert all(map(torch.equal, two, five))


def in_chunks(case: Case, packed: PackedModel, rng: random.Random) -> list[Tensor]:
    """Compute the passes a few tokens of one row at a time; return their logits as those of the whole passes."""
    chunks: list[list[list[Entry]]] = []
    for entries in case.passes:
        cut = []
        for row, start, count in entries:
            step = rng.choice([1, 3, 64]) if count < 100 else rng.choice([33, 64, 128])
            ends = [*range(start, start + count, step), start + count]
            cut += [[(row, begin, end - begin)] for begin, end in pairwise(ends)]
        chunks.append(cut)
    found = iter(case.by_engine(packed, torch.float32, 3, [chunk for cut in chunks for chunk in cut]))
    return [torch.cat([next(found) for _ in cut]) for cut in chunks]


# --- blocks ---


def draw_blocks(kind: GGMLQuantizationType, n: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Draw rows of a format's blocks: any bytes, but finite scales; negative, denormal and zero ones among them."""
    raw = rng.integers(0, 256, (n, blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)

    def scales() -> np.ndarray:
        drawn = (rng.standard_normal((n, blocks)) * 0.05).astype(np.float16)
        drawn[rng.random((n, blocks)) < 0.1] = np.float16(6e-8)
        drawn[rng.random((n, blocks)) < 0.1] = 0
        return drawn.view(np.uint8).reshape(n, blocks, 2)

    if kind.name == "Q6_K":
        raw[:, :, 208:210] = scales()
    else:
        raw[:, :, 0:2] = scales()
        if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            raw[:, :, 2:4] = scales()
    return np.ascontiguousarray(raw.reshape(n, -1))


@pytest.mark.parametrize(
    "n", [1, 31, pytest.param(33, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_blocks_of_any_bytes(kind: GGMLQuantizationType, n: int) -> None:
    rng = np.random.default_rng(n)
    for blocks in (1, 3):
        k = GGML_QUANT_SIZES[kind][0] * blocks
        raw = draw_blocks(kind, n, blocks, rng)
        weight = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(raw, kind)))
        for dtype in (torch.float32, torch.bfloat16):
            packed = PackedWeight(raw, n, k, dtype, int(FORMATS[kind]))
            # Activations of one element are rounded to themselves.
            found, expected = packed.multiply(torch.eye(k).to(dtype)), weight.T
            assert (found - expected).abs().max() <= 1e-6 * (expected.abs().max() + 1e-9)
            for rows in (1, 2, 7, 12, 13, 25, 96):
                x = torch.from_numpy(rng.standard_normal((rows, k))).to(dtype)
                together = packed.multiply(x)
                alone = torch.cat([packed.multiply(x[i : i + 1].contiguous()) for i in range(rows)])
                assert torch.equal(together, alone)


# --- samples ---


def draw_logits(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Draw rows that are peaked or flat, with ties, forbidden tokens or a large offset."""
    logits = (rng.standard_normal((count, vocab)) * rng.choice([0, 1e-3, 1, 8, 40, 3e4, 1e30])).astype(np.float32)
    if rng.random() < 0.4:
        logits = np.round(logits)
    if rng.random() < 0.4:
        logits[rng.random((count, vocab)) < 0.5] = -np.inf
        logits[:, rng.integers(vocab)] = 1.0
    if rng.random() < 0.2:
        logits += np.float32(rng.choice([1e4, -1e4, 1e8]))
    return logits


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_samples_of_any_rules(part: int) -> None:
    """Never a token that is forbidden; the torch sampler's token but where float32's rounding decides."""
    kernel, count, different = NativeSampler(Team(2, spin_us=1)), 4, 0
    for seed in range(60 * part, 60 * part + 60):
        rng = np.random.default_rng(seed)
        vocab = int(rng.choice([1, 2, 3, 15, 16, 17, 31, 64, 65, 255, 256, 257, 1000, 4100]))
        logits = torch.from_numpy(draw_logits(rng, count, vocab))
        rule = {
            "temperature": float(rng.choice([1.01e-5, 1e-3, 0.1, 1, 5, 100.0])),
            "top_p": float(rng.choice([1.0, 0.9999999, 0.5, 1e-9, 0.0, 0.999])),
            "top_k": int(rng.choice([-1, 0, 1, 2, 16, 63, 64, 65, 900, 10**6])),
            "min_p": float(rng.choice([0, 0, 0.05, 0.999, 1.0])),
        }
        states = host_rows(count, vocab)
        for row in range(count):
            states.start(make_row(row, seed=int(rng.integers(2**64, dtype=np.uint64)), **rule))
        params, positions = states.params(np.arange(count)), rng.choice([4, 5, 2**31 - 1, 2**31], count)
        native, plain = kernel.sample(logits.numpy(), params, positions), sample(logits, params, positions)
        assert native.finite.tolist() == plain.finite.tolist(), (seed, rule)
        for row in np.flatnonzero(native.finite).tolist():
            token, other = int(native.tokens[row]), int(plain.tokens[row])
            assert logits[row, [token, other]].isfinite().all(), (seed, row, rule)
            different += token != other
    assert different <= 2
