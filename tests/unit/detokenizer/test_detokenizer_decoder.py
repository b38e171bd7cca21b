"""The stream of pieces against decoding everything at once."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, Unigram

from pdserve.detokenizer.request_decoder import ByteDecoders, ChainDecoders, WindowDecoders, make_decoder_factory
from pdserve.model_files.text.byte_table import ByteTable, byte_level_alphabet, table_for_decoder
from pdserve.model_files.text.load import load_tokenizer
from pdserve.model_files.text.text_tokenizer import FastTokenizer, vocabulary_tokens
from pdserve.server.options import ServerOptions

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SAMPLES = [
    "The quick brown fox, 1234567 times.",
    "def f(x):\n    return {'a': x ** 2}  # comment\n\n\n",
    "你好，世界！日本語のテスト。 한국어",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 family",
    "é à combining; ḱ̕",
    "  leading and trailing  \t\r\n",
    "עברית العربية हिन्दी ไทย",
]


def fast_tokenizer(backend, table=None):
    return FastTokenizer(lambda: backend, lambda: table, (), {}, None)


def byte_level_backend():
    """Make a tokenizer in which every byte is a token.

    A few pieces of characters, a special token and "a b" are tokens, too.
    """
    alphabet = byte_level_alphabet()
    tokens = list(alphabet.values())
    for piece in (b"\xf0\x9f", b"\x98\x80", b"\xe4\xbd", b"\xbd\xa0\xe5", b" the", b"\xcc\x81", b"e\xcc"):
        tokens.append("".join(alphabet[b] for b in piece))
    backend = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("a b", special=False, normalized=False)])
    return backend


def sentencepiece_backend(*, strip):
    tokens = [f"<0x{b:02X}>" for b in range(256)] + ["▁", "▁the", "the", "▁▁", "é", "你", "<0xyz>", "a▁b"]
    backend = Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return backend


def sentencepiece_decoder_json(*, strip):
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def special_ids(backend):
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


BYTE_LEVEL = byte_level_backend()
BYTE_LEVEL_SIZE = BYTE_LEVEL.get_vocab_size()


@pytest.fixture(scope="module")
def smollm():
    return load_tokenizer(ServerOptions())


def stream(factory, token_ids, sizes=(1,), tail=(), skip=True):
    """Return the pieces that ``token_ids`` give in chunks of ``sizes`` (repeated)."""
    decoder = factory.start(np.array(tail, dtype=np.int32), skip_special_tokens=skip)
    pieces, i, n = [], 0, 0
    while i < len(token_ids):
        size = sizes[n % len(sizes)]
        pieces.append(decoder.decode(list(token_ids[i : i + size])))
        i, n = i + size, n + 1
    rest = decoder.flush()
    return [*pieces, rest] if rest else pieces


def whole(backend, token_ids, skip=True):
    """Return all text at once. An incomplete character at the end reads as one U+FFFD, which a stream does not show."""
    return backend.decode(list(token_ids), skip_special_tokens=skip)


def incomplete_end(data):
    """Return whether the bytes end within a character that more bytes could complete."""
    return any(data[-n:].decode(errors="ignore") == "" and could_begin(data[-n:]) for n in (1, 2, 3) if n <= len(data))


def could_begin(data):
    """Return whether some continuation makes the bytes one valid character."""
    fill = [b"", b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"\xbf\xbf\xbf"]
    return any(is_one_character(data + f) for f in fill if f)


def is_one_character(data):
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


ids_of_byte_level = st.lists(st.integers(0, BYTE_LEVEL_SIZE + 2), max_size=40)
chunk_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@example(token_ids=[169, 94], sizes=[1], skip=False)
@given(token_ids=ids_of_byte_level, sizes=chunk_sizes, skip=st.booleans())
def test_byte_level_stream_is_the_whole_decoding(token_ids, sizes, skip):
    table = table_for_decoder({"type": "ByteLevel"}, vocabulary_tokens(BYTE_LEVEL), special_ids(BYTE_LEVEL))
    text = "".join(stream(ByteDecoders(table), token_ids, sizes, skip=skip))
    want = whole(BYTE_LEVEL, token_ids, skip)
    shown = [table.pieces[i] for i in token_ids if i < BYTE_LEVEL_SIZE and not (skip and i in table.special_ids)]
    data = b"".join(shown)
    assert want == data.decode(errors="replace")  # the table says what the tokenizer says
    assert text == (want.removesuffix(REPLACEMENT) if incomplete_end(data) else want)


@given(st.text(max_size=30), chunk_sizes)
def test_byte_level_stream_of_valid_text_shows_no_replacement_character(text, sizes):
    table = table_for_decoder({"type": "ByteLevel"}, vocabulary_tokens(BYTE_LEVEL), frozenset())
    id_of = {piece: i for i, piece in reversed(list(enumerate(table.pieces)))}
    token_ids = [id_of[bytes([b])] for b in text.encode()]
    for factory in (ByteDecoders(table), WindowDecoders(fast_tokenizer(BYTE_LEVEL))):
        pieces = stream(factory, token_ids, sizes)
        assert "".join(pieces) == text


@pytest.mark.parametrize("strip", [True, False])
@example(token_ids=[0x80, 0x80], sizes=[1], tail=[0xE1])
@given(
    token_ids=st.lists(st.integers(0, 264), max_size=30),
    sizes=chunk_sizes,
    tail=st.lists(st.integers(0, 264), max_size=4),
)
def test_byte_fallback_stream_is_the_whole_decoding_behind_the_prompt(strip, token_ids, sizes, tail):
    backend = sentencepiece_backend(strip=strip)
    table = table_for_decoder(sentencepiece_decoder_json(strip=strip), vocabulary_tokens(backend), special_ids(backend))
    everything = whole(backend, tail + token_ids)
    # Of the prompt, what is complete: a character that the output completes is the output's.
    prompt = b"".join(table.pieces[i] for i in tail if i not in table.special_ids).decode(errors="ignore")
    if strip:
        prompt = prompt.removeprefix(" ")
    text = "".join(stream(ByteDecoders(table), token_ids, sizes, tail))
    # A run of byte tokens with a bad one among them is all U+FFFD for the library, its good characters included.
    if REPLACEMENT not in everything:
        assert prompt + text == everything
    shown = b"".join(table.pieces[i] for i in tail + token_ids if i not in table.special_ids)
    assert text.replace(REPLACEMENT, "") in shown.decode(errors="ignore")


@given(
    st.lists(st.integers(256, 264), max_size=40), chunk_sizes, st.lists(st.integers(256, 264), min_size=1, max_size=5)
)
def test_metaspace_stream_is_the_whole_decoding_behind_the_prompt(token_ids, sizes, tail):
    backend = sentencepiece_backend(strip=False)
    backend.decoder = decoders.Metaspace()
    tokenizer = fast_tokenizer(backend)
    assert isinstance(make_decoder_factory(tokenizer), ChainDecoders)
    for factory in (make_decoder_factory(tokenizer), WindowDecoders(tokenizer)):
        text = "".join(stream(factory, token_ids, sizes, tail, skip=False))
        assert whole(backend, tail, skip=False) + text == whole(backend, tail + token_ids, skip=False)


WORDS = ["▁five", "▁dog", "dog", "▁", "s", "##s", "you</w>", "é", "s</w>", "##.", "▁▁"]
SPECIALS = [f"<x{i}>" for i in range(4)]
KINDS = {
    "metaspace": decoders.Metaspace(),
    "metaspace that keeps the first space": decoders.Metaspace(prepend_scheme="never"),
    "sentencepiece": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "word pieces": decoders.WordPiece(cleanup=False),
    "suffixes": decoders.BPEDecoder(),
}


def word_tokenizer(kind, model):
    if model == "unigram":
        backend = Tokenizer(Unigram([(word, -1.0) for word in WORDS], 0, False))
    else:
        backend = Tokenizer(BPE({word: i for i, word in enumerate(WORDS)}, []))
    backend.decoder = KINDS[kind]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken("<added>", special=False, normalized=False)])
    return fast_tokenizer(backend)


word_ids = st.integers(0, len(WORDS) - 1)
special_runs = st.integers(len(WORDS), len(WORDS) + len(SPECIALS) + 2)  # the last one is no token at all
output_ids = st.lists(word_ids.map(lambda i: [i]) | st.lists(special_runs, min_size=1, max_size=40), max_size=24).map(
    lambda runs: [i for run in runs for i in run]
)


@pytest.mark.parametrize(("kind", "model"), [*((kind, "bpe") for kind in KINDS), ("metaspace", "unigram")])
@settings(max_examples=40)
@example(token_ids=[0, *range(11, 15), 11, 12, 1], sizes=[1], tail=[], skip=True)
@example(token_ids=[*range(11, 15), 0, 1], sizes=[1], tail=[1], skip=True)
@given(token_ids=output_ids, sizes=chunk_sizes, tail=st.lists(word_ids | special_runs, max_size=8), skip=st.booleans())
def test_a_stream_is_the_whole_decoding_whatever_is_skipped(kind, model, token_ids, sizes, tail, skip):
    tokenizer = word_tokenizer(kind, model)
    for factory in (ChainDecoders(tokenizer, tokenizer.decoding_chain), WindowDecoders(tokenizer)):
        text = "".join(stream(factory, token_ids, sizes, tail, skip))
        assert whole(tokenizer.backend, tail, skip) + text == whole(tokenizer.backend, tail + token_ids, skip)


def test_a_word_keeps_its_space_behind_many_skipped_tokens():
    tokenizer = word_tokenizer("metaspace", "unigram")
    five, dog, specials = 0, 1, list(range(len(WORDS), len(WORDS) + len(SPECIALS)))
    for count in range(40):
        run = [specials[i % len(specials)] for i in range(count)]
        for factory in (make_decoder_factory(tokenizer), WindowDecoders(tokenizer)):
            assert "".join(stream(factory, [five, *run, dog])) == "five dog", count


def test_the_first_output_token_keeps_its_space_behind_a_prompt_and_loses_it_alone():
    backend = sentencepiece_backend(strip=True)
    tokens = vocabulary_tokens(backend)
    table = table_for_decoder(sentencepiece_decoder_json(strip=True), tokens, special_ids(backend))
    the, bos = tokens.index("▁the"), tokens.index("<s>")
    assert stream(ByteDecoders(table), [the, the], tail=[bos, the]) == [" the", " the"]
    assert stream(ByteDecoders(table), [the, the], tail=[bos]) == ["the", " the"]


def test_a_character_begun_in_the_prompt_is_shown_when_the_output_completes_it():
    table = ByteTable([bytes([b]) for b in range(256)], frozenset(), strip_first_space=False)
    emoji = list("😀".encode())
    assert stream(ByteDecoders(table), [*emoji[2:], ord("!")], tail=[ord("a"), *emoji[:2]]) == ["", "😀", "!"]


def test_bad_bytes_are_shown_as_soon_as_they_are_certain_and_incomplete_ones_never():
    table = ByteTable([bytes([b]) for b in range(256)], frozenset(), strip_first_space=False)
    assert stream(ByteDecoders(table), [0xE4, 0xBD, ord("x"), 0xFF, 0xF0, 0x9F]) == ["", "", "�x", "�", "", ""]


def test_only_bytes_that_something_could_complete_are_held_back():
    table = ByteTable([bytes([b]) for b in range(256)], frozenset(), strip_first_space=False)
    for begun in (bytes([first, second]) for first in range(0x80, 0x100) for second in range(0x100)):
        held = "".join(stream(ByteDecoders(table), begun)) == ""
        assert held == could_begin(begun), begun


def test_a_window_of_bad_tokens_does_not_grow():
    decoder = WindowDecoders(fast_tokenizer(BYTE_LEVEL)).start(np.array([], dtype=np.int32), skip_special_tokens=True)
    bad = vocabulary_tokens(BYTE_LEVEL).index(byte_level_alphabet()[0xFF])
    text = "".join(decoder.decode([bad]) for _ in range(500))
    assert len(text) > 460
    assert len(decoder._window) <= 33


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("sizes", [(1,), (1, 3, 2), (7,)])
def test_smollm_stream_gives_the_text_back(smollm, sample, sizes):
    [token_ids] = smollm.encode_batch([sample], add_special_tokens=False)
    assert isinstance(make_decoder_factory(smollm), ByteDecoders)
    for factory in (make_decoder_factory(smollm), WindowDecoders(smollm)):
        pieces = stream(factory, token_ids, sizes)
        assert "".join(pieces) == sample
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(token_ids=st.lists(st.integers(0, 49151), max_size=60), skip=st.booleans())
@example(token_ids=[184, 111], skip=False)  # ED A1: a surrogate, certain to be no character
def test_smollm_table_is_the_tokenizers_decoder(smollm, token_ids, skip):
    text = "".join(stream(make_decoder_factory(smollm), token_ids, skip=skip))
    want = smollm.decode(token_ids, skip_special_tokens=skip)
    assert text in (want, want.removesuffix(REPLACEMENT))
