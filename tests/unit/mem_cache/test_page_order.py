"""Pages of one order made into the other: against the orders written out element by element, and there and back."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.layouts import latent_layout

from pdserve.mem_cache.kv_pages.page_order import PageConverter, can_exchange
from pdserve.messages.worker import KVGroup, KVLayout, KVOrder
from pdserve.model_runner.kv.layout import KVShape, make_layout

PAGE_SIZES = [1, 2, 4, 8, 16, 32, 48, 64]
ITEM = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


def make(size: int, layers: int, heads: int, dim: int, dtype: str, order: KVOrder) -> KVLayout:
    return make_layout(KVShape(layers, heads, dim), size, getattr(torch, dtype), order)


layouts = st.builds(
    make,
    st.sampled_from(PAGE_SIZES),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([4, 16, 24, 64]),
    st.sampled_from(list(ITEM)),
    st.sampled_from(["tokens", "blocks"]),
)

latent_layouts = st.builds(
    lambda size, layers, dim, dtype, order: latent_layout(
        size, layers, dim, dtype, layers * size * dim * ITEM[dtype], order
    ),
    st.sampled_from(PAGE_SIZES),
    st.integers(1, 3),
    st.sampled_from([2, 16, 48, 80]),
    st.sampled_from(list(ITEM)),
    st.sampled_from(["tokens", "blocks"]),
)


def width(layout: KVLayout) -> int:
    """Return the bytes of a head of a token."""
    group = layout.groups[0]
    return group.head_dim * ITEM[group.dtype] + (0 if group.scale_dtype is None else 4)


def random_page(layout: KVLayout, seed: int) -> np.ndarray[Any, Any]:
    """Return a page of any bits at all: NaN, denormals and invalid values must pass as well."""
    return np.random.default_rng(seed).integers(0, 256, layout.page_bytes, dtype=np.uint8)


def other(order: KVOrder) -> KVOrder:
    return "blocks" if order == "tokens" else "tokens"


def place_in_blocks(layout: KVLayout, part: int, slot: int, head: int) -> tuple[list[int], int]:
    """Return where kv_blocks.h puts the elements of a slot's head, and its scale, in bytes from the layer's begin."""
    size, dim, item = layout.page_size, layout.groups[0].head_dim, ITEM[layout.groups[0].dtype]
    slots, group = min(size, 16), 1 if item == 4 else 2
    block, s = ((part * layout.groups[0].kv_heads + head) * size + slot // slots * slots) * width(layout), slot % slots
    if part == 0:
        places = [(d // group * slots + s) * group + d % group for d in range(dim)]
    elif slots < group:
        places = list(range(dim))
    else:
        places = [(s // group * dim + d) * group + s % group for d in range(dim)]
    return [block + place * item for place in places], block + slots * dim * item + s * 4


@given(layouts, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_element_and_scale_comes_to_its_place(layout: KVLayout, seed: int) -> None:
    before, page = random_page(layout, seed), random_page(layout, seed)
    PageConverter(layout, other(layout.order)).convert(page)
    tokens, blocks = (before, page) if layout.order == "blocks" else (page, before)
    group = layout.groups[0]
    shape = (group.num_layers, 2, layout.page_size, group.kv_heads)
    rows, per_layer = tokens.reshape(*shape, width(layout)), blocks.reshape(group.num_layers, -1)
    for part, slot, head in itertools.product(*map(range, shape[1:])):
        elements, scale = place_in_blocks(layout, part, slot, head)
        at = [element + byte for element in elements for byte in range(ITEM[group.dtype])]
        if group.scale_dtype is not None:
            at += range(scale, scale + 4)
        assert np.array_equal(rows[:, part, slot, head], per_layer[:, at])


@given(latent_layouts, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_latent_rows_are_keys_without_values(layout: KVLayout, seed: int) -> None:
    before, page = random_page(layout, seed), random_page(layout, seed)
    PageConverter(layout, other(layout.order)).convert(page)
    tokens, blocks = (before, page) if layout.order == "blocks" else (page, before)
    group = layout.groups[0]
    per_layer = blocks.reshape(group.num_layers, -1)
    rows = tokens.reshape(group.num_layers, layout.page_size, width(layout))
    for slot in range(layout.page_size):
        elements, _ = place_in_blocks(layout, 0, slot, 0)
        at = [element + byte for element in elements for byte in range(ITEM[group.dtype])]
        assert np.array_equal(rows[:, slot], per_layer[:, at])


@given(layouts | latent_layouts, st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_there_and_back_changes_no_bit(layout: KVLayout, seed: int) -> None:
    page = random_page(layout, seed)
    expected = page.copy()
    PageConverter(layout, other(layout.order)).convert(page)
    PageConverter(msgspec.structs.replace(layout, order=other(layout.order)), layout.order).convert(page)
    assert np.array_equal(page, expected)


@given(layouts, st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_range_of_heads_lies_in_one_piece_in_blocks(layout: KVLayout, seed: int) -> None:
    """What two heads of a layer's keys become depends on those heads, and is where they were dealt out to."""
    layout = msgspec.structs.replace(layout, order="blocks")
    page, changed = random_page(layout, seed), random_page(layout, seed)
    shape = (layout.groups[0].num_layers, 2, layout.page_size, layout.groups[0].kv_heads, -1)
    head = seed % layout.groups[0].kv_heads
    changed.reshape(shape)[:, :, :, head] ^= 0xFF
    for each in (page, changed):
        PageConverter(layout, "tokens").convert(each)
    by_head = (layout.groups[0].num_layers, 2, layout.groups[0].kv_heads, -1)
    differs = (page != changed).reshape(by_head)
    assert differs[:, :, head].all()
    assert not np.delete(differs, head, axis=2).any()


def change(layout: KVLayout, **fields: Any) -> KVLayout:
    """Return the layout with these of its fields changed, or of its groups' fields."""
    group = {name: fields.pop(name) for name in list(fields) if name in KVGroup.__struct_fields__}
    groups = tuple(msgspec.structs.replace(old, **group) for old in layout.groups)
    return msgspec.structs.replace(layout, groups=groups, **fields)


def test_which_layouts_can_be_exchanged() -> None:
    layout = make(16, 2, 2, 16, "bfloat16", "tokens")
    blocks = change(layout, order="blocks")
    assert can_exchange(layout, layout)
    assert can_exchange(layout, blocks)
    assert can_exchange(blocks, layout)
    assert not can_exchange(blocks, change(layout, page_size=32, page_bytes=8192))
    assert not can_exchange(blocks, change(layout, dtype="float32", page_bytes=8192))
    assert not can_exchange(layout, change(layout, kind="mla"))
    int8 = make(16, 2, 2, 16, "int8", "tokens")
    assert can_exchange(int8, change(int8, order="blocks"))
    assert not can_exchange(int8, change(int8, dtype="float8_e4m3fn"))
    # No other orders of these exist; equal ones need no converter.
    changes: list[dict[str, Any]] = [
        {"dtype": "int64"},
        {"page_size": 24},
        {"head_dim": 3},
        {"scale_dtype": "bfloat16"},
    ]
    for odd in (change(layout, **fields) for fields in changes):
        assert can_exchange(odd, odd)
        assert not can_exchange(odd, change(odd, order="blocks"))
        with pytest.raises(ValueError, match="one order only"):
            PageConverter(odd, "blocks")
