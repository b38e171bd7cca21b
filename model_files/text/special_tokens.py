"""The tokens that a folder's JSON files add to its tokenizer.json, in transformers' precedence (docs/models.md).

tokenizer_config.json counts. Only if it has no ``added_tokens_decoder``, special_tokens_map.json overrides the tokens
that it names, and added_tokens.json has further ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from ..errors import brief, shortened
from .errors import TokenizerLoadError
from .template_source import read_json_object

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG = "tokenizer_config.json"
OLDER = "special_tokens_map.json"
OLDER_ADDED = "added_tokens.json"


class StatedTokens(NamedTuple):
    """What the files state beside tokenizer.json."""

    named: dict[str, str]
    """Texts by name ("bos_token"), for chat templates."""
    added: dict[int, AddedToken]
    """Tokens by the id that the files give them."""
    special: list[AddedToken]
    """Special tokens without an id."""
    is_older: bool
    """Whether tokenizer_config.json lists no added tokens, so that those of tokenizer.json count as listed."""


class _TokenEntry(msgspec.Struct):
    """An added token as the files describe it. ``normalized`` None: it is, unless it is special."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False


def read_stated_tokens(folder: Path) -> StatedTokens:
    """Read the tokens that the files in ``folder`` state. Raises ``TokenizerLoadError``."""
    config = read_json_object(folder / CONFIG)
    is_older = "added_tokens_decoder" not in config
    older = read_json_object(folder / OLDER) if is_older else {}
    both = config | older
    extra, extra_named = _extra(folder, config, older)
    names = [*NAMED_TOKENS, *(name for name in both if name.endswith("_token") and name not in NAMED_TOKENS)]
    tokens = dict(_named(folder, {name: both.get(name) for name in names} | extra_named))
    special = [*tokens.values(), *(_as_token(folder, "extra_special_tokens", value) for value in extra)]
    if is_older:
        added = _added_by_older(folder, {token.content for token in special})
    else:
        added = _added(folder, config["added_tokens_decoder"])
    return StatedTokens({name: token.content for name, token in tokens.items()}, added, special, is_older)


def add_stated(backend: Tokenizer, stated: StatedTokens) -> None:
    """Add to ``backend`` the tokens of ``stated`` that it lacks, or has with other properties.

    A token that the library would give another id than the files do is left out: the model knows it by the files'.
    """
    known = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    # The library goes on to treat a token as special that once was.
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special |= set(stated.named.values())
    listed = stated.added | (backend.get_added_tokens_decoder() if stated.is_older else {})
    wanted, next_id = list[AddedToken](), _next_id(backend)
    for token_id, token in sorted(listed.items()):
        token.special |= token.content in special
        is_new = backend.token_to_id(token.content) is None
        if repr(token) != known.get(token.content) and not (is_new and token_id != next_id):
            wanted.append(token)
            next_id += is_new
    mentioned = known.keys() | {token.content for token in listed.values()}
    # All at once: the library makes its search anew each time.
    backend.add_tokens([*wanted, *(token for token in stated.special if token.content not in mentioned)])


def _next_id(backend: Tokenizer) -> int:
    """Return the id that the library gives to the next new token."""
    size = backend.get_vocab_size(with_added_tokens=False)
    return max(size, max(backend.get_added_tokens_decoder(), default=-1) + 1)


def _extra(folder: Path, config: Mapping[str, Any], older: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the special tokens that are listed without names, and those with further names; as the JSON has them.

    ``config``: content of tokenizer_config.json. ``older``: that of special_tokens_map.json. ``folder`` is for
    messages.
    """
    further = "extra_special_tokens", "additional_special_tokens"
    first: Any = next((source[name] for source in (config, older) for name in further if source.get(name)), [])
    listed: list[Any] = []
    named: dict[str, Any] = {}
    for value in (first, older.get(further[0]) or []):
        if isinstance(value, dict):
            named |= value
        elif isinstance(value, list):
            listed += [token for token in value if token not in listed]
        else:
            raise TokenizerLoadError(
                f"{folder / CONFIG}: extra_special_tokens {shortened(repr(value))} is no list of tokens"
            )
    return listed, _model_specific(folder, config) | named


def _model_specific(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens under ``model_specific_special_tokens``.

    In transformers, other tokens with further names in tokenizer_config.json replace them.
    """
    others = [name for name in config if name.endswith("_token") and name not in NAMED_TOKENS]
    if any(isinstance(config[name], str | dict) for name in others) or isinstance(
        config.get("extra_special_tokens"), dict
    ):
        return {}
    key = "model_specific_special_tokens"
    tokens = config.get(key) or {}
    if not isinstance(tokens, dict):
        raise TokenizerLoadError(f"{folder / CONFIG}: {key} {shortened(repr(tokens))} is no table of tokens by name")
    return tokens


def _named(folder: Path, stated: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken]]:
    for name, value in stated.items():
        if (name in NAMED_TOKENS and value is not None) or isinstance(value, str | dict):
            yield name, _as_token(folder, name, value)


def _as_token(folder: Path, name: str, value: Any) -> AddedToken:
    """Return a token that the JSON has as its text, or as an object with its properties.

    Raises ``TokenizerLoadError`` for anything else.
    """
    if isinstance(value, str):
        return AddedToken(value, special=True)
    try:
        return _made(msgspec.convert(value, _TokenEntry), special=True)
    except msgspec.ValidationError as e:
        raise TokenizerLoadError(
            f"{folder / CONFIG}: {name} {shortened(repr(value))} is no token ({brief(e)}); write its text"
        ) from e


def _added(folder: Path, entries: Any) -> dict[int, AddedToken]:
    try:
        tokens = msgspec.convert(entries, dict[int, _TokenEntry], strict=False)
    except msgspec.ValidationError as e:
        raise TokenizerLoadError(f"{folder / CONFIG}: added_tokens_decoder is no table of tokens: {brief(e)}") from e
    return {token_id: _made(entry, special=entry.special) for token_id, entry in tokens.items()}


def _added_by_older(folder: Path, special: Iterable[str]) -> dict[int, AddedToken]:
    added = read_json_object(folder / OLDER_ADDED)
    if not all(isinstance(token_id, int) for token_id in added.values()):
        raise TokenizerLoadError(f"{folder / OLDER_ADDED} is no table of token ids by token")
    return {
        token_id: AddedToken(text, special=text in special, normalized=text not in special)
        for text, token_id in added.items()
    }


def _made(entry: _TokenEntry, *, special: bool) -> AddedToken:
    """Make the library's token. ``special`` decides whether it is special, whatever ``entry`` says."""
    return AddedToken(
        entry.content,
        single_word=entry.single_word,
        lstrip=entry.lstrip,
        rstrip=entry.rstrip,
        normalized=not special if entry.normalized is None else entry.normalized,
        special=special,
    )
