"""The streamed text of every kind of tokenizer against the whole text that transformers decodes.

A stream differs in two ways, which are wanted. A character that is incomplete at the end of an output is not shown. And
in a run of byte tokens with a bad byte, the good characters are shown, as SentencePiece does. The library shows U+FFFD
for each byte of the run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from support.tokenizer_kinds import BYTES, GGUF_KINDS, KINDS, REPLACEMENT, TokenizerPair, draw_ids, make_pair

from pdserve.detokenizer.request_decoder import DecoderFactory, make_decoder_factory
from pdserve.model_files.text.byte_table import byte_level_bytes

SEQUENCES, SAMPLED = 2000, 40


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerPair]:
    folders = {name: tmp_path_factory.mktemp("tokenizer") for name in (*KINDS, *GGUF_KINDS)}
    return {name: make_pair(name, folder) for name, folder in folders.items()}


def streamed(factory: DecoderFactory, ids: Sequence[int], sizes: Sequence[int], *, skip: bool) -> str:
    """Decode ``ids`` in pieces of ``sizes``, which are repeated."""
    decoder = factory.start(np.array([], dtype=np.int32), skip_special_tokens=skip)
    pieces, i, n = [], 0, 0
    while i < len(ids):
        size = sizes[n % len(sizes)]
        pieces.append(decoder.decode(list(ids[i : i + size])))
        i, n = i + size, n + 1
    return "".join([*pieces, decoder.flush()])


def could_be_completed(data: bytes) -> bool:
    """Return whether more bytes may make one character of ``data``."""
    fills = [fill * count for fill in (b"\x80", b"\xbf", b"\x90", b"\xa0") for count in (1, 2, 3)]
    return any(is_character(data + fill) for fill in fills)


def good_bytes(run: bytes) -> list[int | None]:
    """Return the bytes of a run of byte tokens, None for those that are part of no character."""
    found: list[int | None] = []
    while len(found) < len(run):
        rest = run[len(found) :]
        size = next((n for n in range(1, 5) if is_character(rest[:n])), 0)
        found += rest[:size] or [None]
    return found


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def expected(pair: TokenizerPair, ids: Sequence[int], *, skip: bool) -> str:
    """Return transformers' text of ``ids``, but for the two wanted differences."""
    shown = [i for i in ids if i in pair.tokens and not (skip and i in pair.specials)]
    tokens = [pair.tokens[i] for i in shown]
    if "<0xFF>" in pair.tokens.values():
        return pair.theirs(with_good_bytes(pair, shown), skip)
    text = pair.theirs(ids, skip)
    data = b"".join(map(byte_level_bytes, tokens))
    is_byte_level = "Ġ" in pair.tokens.values()
    if is_byte_level and any(could_be_completed(data[-n:]) for n in (1, 2, 3) if n <= len(data)):
        return text.removesuffix(REPLACEMENT)
    return text


def with_good_bytes(pair: TokenizerPair, ids: Sequence[int]) -> list[int]:
    """Return ``ids`` with U+FFFD in the place of bad bytes, and without bytes that are incomplete at the end."""
    id_of = {token: token_id for token_id, token in pair.tokens.items()}
    result: list[int] = []
    run = b""
    for token_id in [*ids, None]:
        token = None if token_id is None else pair.tokens[token_id]
        if token in BYTES:
            run += bytes([BYTES.index(token)])
            continue
        if token_id is None:
            incomplete = next((n for n in (3, 2, 1) if n <= len(run) and could_be_completed(run[-n:])), 0)
            run = run[: len(run) - incomplete]
        result += [id_of[REPLACEMENT if byte is None else BYTES[byte]] for byte in good_bytes(run)]
        run = b""
        if token_id is not None:
            result.append(token_id)
    return result


def check(pair: TokenizerPair, seed: str, count: int) -> None:
    rng = random.Random(seed)
    factory = make_decoder_factory(pair.ours)
    for _ in range(count):
        ids = draw_ids(rng, pair)
        sizes = [rng.randrange(1, 6) for _ in range(4)]
        for skip in (True, False):
            want = expected(pair, ids, skip=skip)
            tokens = [pair.tokens.get(i) for i in ids]
            assert streamed(factory, ids, [1], skip=skip) == want, tokens
            assert streamed(factory, ids, sizes, skip=skip) == want, (tokens, sizes)


@pytest.mark.parametrize("name", [*KINDS, *GGUF_KINDS])
def test_a_stream_is_the_whole_text_of_every_kind_of_tokenizer(pairs: dict[str, TokenizerPair], name: str) -> None:
    check(pairs[name], name, SAMPLED)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*KINDS, *GGUF_KINDS])
def test_two_thousand_streams_of_every_kind_are_whole(pairs: dict[str, TokenizerPair], name: str) -> None:
    check(pairs[name], f"{name}, all", SEQUENCES)
