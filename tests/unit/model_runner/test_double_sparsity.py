"""DoubleSparsity: which tokens are chosen, what attention to them gives, and models over pools with labels."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from support.model_harness import CONTEXT, PAGE, VOCAB, Harness, Rows, close, draw, draw_weights
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve.mem_cache.kv_pages.page_order import can_exchange
from pdserve.messages.worker import KVLayout
from pdserve.model_files.spec import AttentionSpec
from pdserve.model_runner.attention.base import AttentionBackend
from pdserve.model_runner.attention.sparse.attention import DoubleSparsityAttention
from pdserve.model_runner.attention.torch_backend import TorchAttention
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.calibration.calibrate import Magnitudes
from pdserve.model_runner.kv.layout import KVShape, make_layout
from pdserve.model_runner.kv.pool import MHATokenToKVPool, make_pool
from pdserve.model_runner.kv.sparse.channels import LabelChannels, write_channels
from pdserve.model_runner.kv.sparse.pool import SparseTokenToKVPool
from pdserve.model_runner.options import RECENT_TOKENS

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
LAYERS, KV_HEADS, GROUP, DIM, LABEL = 2, 3, 2, 14, 6
SPEC = AttentionSpec(heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5)
CHOSEN = 24


class Row(NamedTuple):
    """Queries of each token in one layer, [T, H, D], and its keys and values, [T, K, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def draw_row(tokens: int, seed: int) -> Row:
    """Draw keys and queries with a few loud channels, as models have them, others in each head."""
    draw = torch.Generator().manual_seed(seed)
    loud = torch.full((KV_HEADS, DIM), 0.15)
    for head in range(KV_HEADS):
        loud[head, head : head + LABEL] = 2.0
    q = torch.randn(tokens, KV_HEADS, GROUP, DIM, generator=draw) * loud[:, None]
    k, v = torch.randn(tokens, KV_HEADS, DIM, generator=draw) * loud, torch.randn(tokens, KV_HEADS, DIM, generator=draw)
    return Row(q.flatten(1, 2), k, v)


def loud_channels() -> LabelChannels:
    first = torch.arange(KV_HEADS)[:, None]
    ranked = (first + torch.arange(DIM)) % DIM
    return LabelChannels.of(ranked.expand(LAYERS, -1, -1), LABEL)


class Table(Rows):
    """Rows of one layer's queries, keys and values, and attention to them."""

    def __init__(self, attention: AttentionBackend) -> None:
        super().__init__(self._attend)
        self._attention = attention
        self._next: list[Row] = []

    def attend(self, *entries: tuple[int, Row]) -> list[torch.Tensor]:
        """Return what each entry's tokens come to, [T, H * D]. They follow what the row holds."""
        self._next = [row for _, row in entries]
        out = self.forward(*((row, [0] * len(given.q)) for row, given in entries))
        return list(torch.split(out, [len(given.q) for _, given in entries]))

    def _attend(self, batch: ForwardBatch) -> torch.Tensor:
        self._attention.plan(batch)
        q, k, v = (torch.cat(parts) for parts in zip(*self._next, strict=True))
        return self._attention.forward(1, q, k, v, SPEC)


def sparse_pool(channels: LabelChannels, pages: int = 97) -> SparseTokenToKVPool:
    shape = KVShape(LAYERS, KV_HEADS, DIM)
    pool = make_pool(make_layout(shape, PAGE, torch.float32, labels=channels), pages, CPU, labels=channels)
    assert isinstance(pool, SparseTokenToKVPool)
    return pool


def sparse_table(chosen: int = CHOSEN, threshold: int = 0, channels: LabelChannels | None = None) -> Table:
    pool = sparse_pool(loud_channels() if channels is None else channels)
    return Table(DoubleSparsityAttention(pool, torch.float32, chosen, threshold))


def dense_table() -> Table:
    pool = MHATokenToKVPool(make_layout(KVShape(LAYERS, KV_HEADS, DIM), PAGE, torch.float32), 97, CPU)
    return Table(TorchAttention([pool], torch.float32))


def calibrated(row: Row) -> torch.Tensor:
    """Return the channels [L, K, D] as ``row`` ranks them."""
    pool = MHATokenToKVPool(make_layout(KVShape(LAYERS, KV_HEADS, DIM), PAGE, torch.float32), 97, CPU)
    found = Magnitudes(TorchAttention([pool], torch.float32), (LAYERS, KV_HEADS, DIM), CPU)
    Table(found).attend((0, row))
    return found.ranked()


def part(row: Row, begin: int, end: int) -> Row:
    return Row(*(x[begin:end] for x in row))


def weights_of(row: Row, channels: torch.Tensor | None = None) -> torch.Tensor:
    """Return the last token's softmax over all tokens in float64, [K, G, T]; by ``channels`` [K, C] alone if given."""
    q, k = row.q[-1].view(KV_HEADS, GROUP, DIM).double(), row.k.double().transpose(0, 1)
    if channels is not None:
        q = q.gather(-1, channels[:, None].expand(-1, GROUP, -1))
        k = k.gather(-1, channels[:, None].expand(-1, k.shape[1], -1))
    return (q @ k.transpose(1, 2) * SPEC.scale).softmax(-1)


def chosen_of(row: Row, channels: LabelChannels, count: int) -> torch.Tensor:
    """Return the tokens that each head chooses, [K, G, T] bool, in float64."""
    scores = weights_of(row, channels.indices[1])
    scores[..., -RECENT_TOKENS:] = torch.inf
    return torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, scores.topk(count, -1).indices, True)


def attended(row: Row, chosen: torch.Tensor) -> torch.Tensor:
    """Return the last token's attention to ``chosen`` [K, G, T] alone, in float64: [H * D]."""
    weights = weights_of(row) * chosen
    return (weights / weights.sum(-1, keepdim=True) @ row.v.double().transpose(0, 1)).flatten()


@pytest.mark.parametrize("label", [1, 6, 14])
def test_a_page_holds_keys_values_and_labels(label: int) -> None:
    channels = LabelChannels.of(torch.stack([torch.randperm(DIM) for _ in range(6)]).view(LAYERS, KV_HEADS, DIM), label)
    pool, row = sparse_pool(channels, 9), draw_row(5 * PAGE, 1)
    assert pool.layout.page_bytes == LAYERS * PAGE * KV_HEADS * (2 * DIM + label) * 4 == pool.data[0].nbytes
    pages = torch.tensor([7, 2, 5, 1, 3])
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    pool.store(1, pool.token_rows(slots), row.k, row.v)
    keys, values = pool.gather(1, pages)
    assert torch.equal(keys, row.k)
    assert torch.equal(values, row.v)
    assert not pool.gather(0, pages)[0].any()
    expected = row.k.gather(-1, channels.indices[1].expand(len(row.k), -1, -1)).transpose(0, 1)
    assert torch.equal(pool.gather_labels(1, pool.label_rows(pages[None])), expected)
    lanes = torch.tensor([3, 19, 8])
    some = pool.gather_heads(1, pool.lane_rows(pages[None])[:, lanes].expand(1, KV_HEADS, -1))
    assert torch.equal(some[0][0], row.k[lanes].transpose(0, 1))
    assert torch.equal(some[1][0], row.v[lanes].transpose(0, 1))
    # As KVGroup says: keys, values, then labels, heads before tokens.
    page = pool.data[2, 1].split([PAGE * KV_HEADS * DIM] * 2 + [PAGE * KV_HEADS * label])
    assert torch.equal(page[0].view(PAGE, KV_HEADS, DIM), row.k[PAGE : 2 * PAGE])
    assert torch.equal(page[2].view(KV_HEADS, PAGE, label), expected[:, PAGE : 2 * PAGE])
    pool.clear(torch.tensor([2]))
    assert not pool.data[2].any()
    assert pool.data[7].any()
    assert not pool.data[0].any()


@pytest.mark.parametrize("tokens", [CHOSEN + 1, 61, 200])
def test_tokens_are_chosen_as_float64_chooses_and_attended_exactly(tokens: int) -> None:
    table, row = sparse_table(), draw_row(tokens, tokens)
    table.attend((0, part(row, 0, tokens - 1)))
    [got] = table.attend((0, part(row, tokens - 1, tokens)))
    expected = attended(row, chosen_of(row, loud_channels(), CHOSEN))
    torch.testing.assert_close(got[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_what_is_left_out_bounds_the_error() -> None:
    """Channels that calibration finds leave out little; those that it ranks last, much."""
    row, ranked = draw_row(240, 3), calibrated(draw_row(100, 2))
    row = row._replace(q=row.q * 4)  # of which few tokens get most
    [full] = dense_table().attend((0, row))
    errors = []
    for channels in (LabelChannels.of(ranked, LABEL), LabelChannels.of(ranked.flip(-1), LABEL)):
        table = sparse_table(channels=channels)
        table.attend((0, part(row, 0, 239)))
        [got] = table.attend((0, part(row, 239, 240)))
        missed = 1 - (weights_of(row) * chosen_of(row, channels, CHOSEN)).sum(-1)
        error = (got[0] - full[-1]).view(KV_HEADS, GROUP, DIM).abs().amax(-1)
        assert (error <= 2 * missed * row.v.abs().max() + 1e-5).all()
        errors.append(float((got[0] - full[-1]).norm() / full[-1].norm()))
    assert errors[0] < 0.1
    assert errors[1] > 0.5


@pytest.mark.parametrize(("chosen", "threshold"), [(CHOSEN, 200), (200, 0), (220, 30)])
def test_short_rows_attend_in_full(chosen: int, threshold: int) -> None:
    row, full, table = draw_row(210, 4), dense_table(), sparse_table(chosen, threshold)
    for begin, end in ((0, 190), *((i, i + 1) for i in range(190, 200))):
        assert torch.equal(*(t.attend((0, part(row, begin, end)))[0] for t in (full, table)))
    for t in (full, table):
        t.attend((0, part(row, 200, 209)))
    beyond = [t.attend((0, part(row, 209, 210)))[0] for t in (full, table)]
    assert torch.equal(*beyond) == (chosen > 209)


def test_prompts_attend_in_full_and_what_was_generated_chooses_whenever_it_is_computed() -> None:
    row, full = draw_row(150, 5), dense_table()
    expected = full.attend((0, row))[0]
    steps = sparse_table()
    steps.prompt_lens = {0: 100}
    once = [steps.attend((0, part(row, 0, 100)))[0]]
    assert torch.equal(once[0], full.attend((1, part(row, 0, 100)))[0])
    once += [steps.attend((0, part(row, i, i + 1)))[0] for i in range(100, 150)]
    pieces = sparse_table()
    pieces.prompt_lens = {0: 100}
    again = [pieces.attend((0, part(row, a, b)))[0] for a, b in ((0, 90), (90, 99), (99, 100), (100, 101), (101, 150))]
    torch.testing.assert_close(torch.cat(again), torch.cat(once), atol=1e-5, rtol=1e-5)
    assert (torch.cat(once)[100:] - expected[100:]).abs().max() > 0.01
    torch.testing.assert_close(torch.cat(once)[:100], expected[:100], atol=1e-5, rtol=1e-5)


def test_company_changes_no_bit() -> None:
    rows = [draw_row(length, length) for length in (230, 40, 100, 10)]
    together, alone = sparse_table(), [sparse_table() for _ in rows]
    for i, row in enumerate(rows):
        for table in (together, alone[i]):
            table.attend((i, part(row, 0, len(row.q) - 2)))
    for back in (2, 1):
        steps = [(i, part(row, len(row.q) - back, len(row.q) - back + 1)) for i, row in enumerate(rows)]
        beside = together.attend(*steps)
        assert all(torch.equal(beside[i], alone[i].attend(step)[0]) for i, step in enumerate(steps))


def test_many_tokens_choose_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, once, turns = [draw_row(90, 6), draw_row(60, 7)], sparse_table(), sparse_table()
    given = [(i, part(row, 0, len(row.q) - 1)) for i, row in enumerate(rows)]
    last = [(i, part(row, len(row.q) - 1, len(row.q))) for i, row in enumerate(rows)]
    once.attend(*given)
    expected = once.attend(*last)
    monkeypatch.setattr("pdserve.model_runner.attention.sparse.attention.MOST_LANES", 97)
    turns.attend(*given)
    assert all(torch.equal(*pair) for pair in zip(turns.attend(*last), expected, strict=True))


def test_of_equal_scores_the_later_is_chosen() -> None:
    row = draw_row(100, 8)
    row.k[:] = 1.0
    table = sparse_table()
    table.attend((0, part(row, 0, 99)))
    [got] = table.attend((0, part(row, 99, 100)))
    last = row.v[-CHOSEN:].mean(0)[:, None].expand(-1, GROUP, -1)
    torch.testing.assert_close(got.view(last.shape), last, atol=1e-5, rtol=1e-5)


def test_what_is_no_number_is_not_passed_over() -> None:
    row, table = draw_row(100, 9), sparse_table()
    row.k[40, 1] = -torch.nan
    table.attend((0, part(row, 0, 99)))
    [got] = table.attend((0, part(row, 99, 100)))
    is_number = got.view(KV_HEADS, -1).isfinite()
    assert is_number[[0, 2]].all()
    assert not is_number[1].any()


def test_a_former_owners_nan_is_not_chosen() -> None:
    row = draw_row(98, 10)
    clean, dirty = sparse_table(), sparse_table()
    dirty._attention._labelled.data[1:].fill_(torch.nan)
    dirty.attend((0, part(row, 0, 97))), clean.attend((0, part(row, 0, 97)))
    assert torch.equal(*(t.attend((0, part(row, 97, 98)))[0] for t in (dirty, clean)))


def test_labels_are_exchanged_by_those_that_have_the_same() -> None:
    shape, channels = KVShape(LAYERS, KV_HEADS, DIM), loud_channels()

    def layout(labels: LabelChannels | None) -> KVLayout:
        return make_layout(shape, 16, torch.float32, labels=labels)

    ours, others = layout(channels), LabelChannels.of(channels.indices.flip(1), LABEL)
    assert can_exchange(ours, layout(loud_channels()))
    for theirs in (layout(None), layout(others), msgspec.structs.replace(ours, order="blocks")):
        assert not can_exchange(ours, theirs)
        assert not can_exchange(theirs, ours)
    for wrong in ({"order": "blocks"}, {"windows": {0: 16}}):
        with pytest.raises(ValueError, match="in the order of tokens"):
            make_layout(shape, 16, torch.float32, labels=channels, **wrong)
    with pytest.raises(ValueError, match="in the order of tokens"):
        make_layout(shape, 16, torch.int8, labels=channels)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    shape = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 84, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT}
    draw_weights(LlamaForCausalLM(LlamaConfig(**shape, **heads))).save_pretrained(folder)
    ranked = torch.arange(16).expand(3, 2, -1)
    spec = Harness(folder, attention_backend="torch").runner.spec
    assert spec is not None
    write_channels(folder / "channels.json", spec, ranked, 1)
    return folder


def sparse_harness(folder: Path, **options: object) -> Harness:
    asked = {"enable_double_sparsity": True, "ds_channel_config_path": str(folder / "channels.json")}
    asked |= {"ds_heavy_token_num": CHOSEN, "ds_sparse_decode_threshold": 0, "attention_backend": "torch"}
    return Harness(folder, **(asked | options))


def test_a_model_goes_on_behind_pages_of_another_behind_a_prefix_and_after_it_was_retracted(llama: Path) -> None:
    tokens, prompt_len = draw(120, 1), 80
    whole = sparse_harness(llama)
    whole.prompt_lens = {0: prompt_len, 1: prompt_len, 2: prompt_len}
    expected = [whole.forward((0, tokens[:prompt_len]))[-1:]]
    expected += [whole.forward((0, [token])) for token in tokens[prompt_len:]]
    dense = Harness(llama, attention_backend="torch").forward((0, tokens))
    close(expected[0], dense[prompt_len - 1 : prompt_len])
    assert (expected[-1] - dense[-1]).abs().max() > 1e-2
    decode = sparse_harness(llama)
    decode.prompt_lens = {0: prompt_len}
    prefill = sparse_harness(llama)
    prefill.forward((0, tokens[:prompt_len]))
    decode.take_over(0, prefill.hand_over(0))
    close(torch.cat([decode.forward((0, [token])) for token in tokens[prompt_len:]]), torch.cat(expected[1:]))
    # All of the prompt but one token is there.
    whole.share(0, 1, prompt_len - PAGE)
    whole.forward((1, tokens[prompt_len - PAGE : prompt_len - 1]))
    close(whole.forward((1, tokens[prompt_len - 1 : prompt_len])), expected[0])
    again = whole.forward((2, tokens[:110]))
    close(again[prompt_len:], torch.cat(expected[1:31]))
    close(whole.forward((2, tokens[110:]))[-1:], expected[-1])
