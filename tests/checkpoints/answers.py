"""What pdserve and transformers make of a checkpoint."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from support.model_harness import Harness, draw
from support.quick_gguf import quick_gguf
from torch import Tensor

from pdserve.model_files.errors import ModelError
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.sampling_defaults import SamplingDefaults, read_sampling_defaults
from pdserve.model_files.text.errors import TextError
from pdserve.model_files.text.load import load_tokenizer
from pdserve.server.options import ServerOptions

from .checkpoint import CONFIG, GENERATION

GREEDY = 6
TEXTS = (
    "hello world</s> ab12",
    "<s>hell </s>  <pad>he<think>x <tool> y",
    "<image>ab ab<new> <end> é <extra>z",
    "  ",
)
GGUF_TEXTS = (
    *TEXTS,
    "\nüber  the quick<|user|> dog",
    " the lazy▁the▁lazy\n\n\n 你😀[INST]   ",
    "<0x0A><unk> tokenizer<tool> é<unused0>",
    "",
)
REFUSALS = (ModelError, TextError)
"""Errors with which pdserve refuses a model."""


class ReferenceFailed(Exception):
    """Transformers does not load the checkpoint, or draws a part of it at random."""


class Tokens(NamedTuple):
    """Greedy ``tokens`` after each prompt, and the ``logits`` [L, V] that they were chosen by."""

    tokens: list[list[int]]
    logits: list[Tensor]


class Texts(NamedTuple):
    """``ids`` of each text, with and without what the tokenizer adds. ``shown``: the texts of these ids without special
    tokens. ``named``: the named tokens. ``ends``: ids that end a text. ``template``: the chat template, or None.
    """

    ids: list[list[int]]
    shown: list[str]
    named: dict[str, str]
    ends: set[int]
    template: str | None = None


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Return random prompts of these lengths, of tokens that every vocabulary here has."""
    return [draw(length, seed) for seed, length in enumerate(lengths)]


def our_tokens(path: Path, lengths: Sequence[int], context: int | None) -> Tokens:
    """Return what pdserve generates in float32. Raises one of ``REFUSALS``."""
    options = {} if context is None else {"context_length": context}
    harness = Harness(path, attention_backend="torch", **options)
    found = Tokens([], [])
    for row, prompt in enumerate(prompts(lengths)):
        logits, tokens = [], list(prompt)
        for _ in range(GREEDY):
            given = tokens[len(prompt) + len(logits) - 1 :] if logits else prompt
            logits.append(harness.forward((row, given), logits_at=[len(given) - 1])[0])
            tokens.append(int(logits[-1].argmax()))
        found.tokens.append(tokens[len(prompt) :])
        found.logits.append(torch.stack(logits))
    return found


def load_reference(folder: Path) -> torch.nn.Module:
    """Load the checkpoint with transformers. Raises ``ReferenceFailed``."""
    with _quiet():
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
                local_files_only=True,
            )
        except Exception as e:
            raise ReferenceFailed(f"{e.__class__.__name__}: {e}") from e
    for what in ("missing_keys", "mismatched_keys"):
        if report[what]:
            raise ReferenceFailed(f"it draws {sorted(map(str, report[what]))[0]} at random")
    reference: torch.nn.Module = model.eval()
    return reference


def reference_logits(model: torch.nn.Module, lengths: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the logits by which ``model`` chooses each of ``tokens`` after the prompts."""
    found = []
    with torch.inference_mode(), _quiet():
        for prompt, chosen in zip(prompts(lengths), tokens, strict=True):
            text = torch.tensor([[*prompt, *chosen[:-1]]])
            try:
                found.append(model(text, use_cache=False).logits[0, len(prompt) - 1 :])
            except Exception as e:
                raise ReferenceFailed(f"{e.__class__.__name__}: {e}") from e
    return found


def our_texts(path: Path, texts: Sequence[str] = TEXTS) -> Texts:
    """Return what pdserve's tokenizer makes of ``texts``. Raises one of ``REFUSALS``."""
    tokenizer = load_tokenizer(ServerOptions(model_path=str(path)))
    ids = [tokenizer.encode_batch([text], add_special_tokens=adds)[0] for text in texts for adds in (True, False)]
    shown = [tokenizer.decode(found, skip_special_tokens=True) for found in ids]
    templates = tokenizer.chat_template
    return Texts(
        *(ids, shown, dict(tokenizer.special_tokens), set(tokenizer.eos_ids)),
        template=None if templates is None else templates.default,
    )


def their_texts(folder: Path) -> Texts:
    """Return what transformers' tokenizer makes of ``TEXTS``. Raises ``ReferenceFailed``.

    A text ends at what the JSON files state, and at the tokenizer's own token. Transformers takes
    generation_config.json alone, or config.json without that file.
    """
    with _quiet():
        try:
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            generation = _generation_ends(folder)
        except Exception as e:
            raise ReferenceFailed(f"{e.__class__.__name__}: {e}") from e
        ids, shown = _ids_and_texts(tokenizer, TEXTS)
    ends = _ends(folder, CONFIG) | _ends(folder, GENERATION) | {tokenizer.eos_token_id}
    assert generation <= ends
    ends -= {None}
    return Texts(ids, shown, dict(tokenizer.special_tokens_map), ends, tokenizer.chat_template)


def their_gguf_texts(path: Path) -> Texts:
    """Return what transformers' tokenizer of a GGUF makes of ``GGUF_TEXTS``. Raises ``ReferenceFailed``."""
    with _quiet(), quick_gguf():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
        except Exception as e:
            raise ReferenceFailed(f"{e.__class__.__name__}: {e}") from e
        ids, shown = _ids_and_texts(tokenizer, GGUF_TEXTS)
    # Gemma's class has a mask whatever the file says.
    named = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "mask_token"}
    return Texts(ids, shown, named, {tokenizer.eos_token_id} - {None}, tokenizer.chat_template)


def _ids_and_texts(tokenizer: Any, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
    ids = [tokenizer.encode(text, add_special_tokens=adds) for text in texts for adds in (True, False)]
    return ids, [tokenizer.decode(found, skip_special_tokens=True) for found in ids]


def our_sampling(folder: Path) -> dict[str, float]:
    """Return pdserve's sampling defaults. Raises one of ``REFUSALS``."""
    return dict(read_sampling_defaults(ModelSource("hf", folder)).given)


def their_sampling(folder: Path) -> dict[str, float]:
    """Return transformers' sampling defaults, but for a top_k of all tokens. Raises ``ReferenceFailed``."""
    with _quiet():
        try:
            stated = _generation_config(folder)
        except Exception as e:
            raise ReferenceFailed(f"{e.__class__.__name__}: {e}") from e
    values = {name: getattr(stated, name) for name in SamplingDefaults._fields}
    return {name: value for name, value in values.items() if value is not None and (name, value) != ("top_k", 0)}


def _generation_config(folder: Path) -> Any:
    """Return the config that transformers' models generate with."""
    if (folder / GENERATION).is_file():
        return transformers.GenerationConfig.from_pretrained(folder)
    return transformers.GenerationConfig.from_pretrained(folder, config_file_name=CONFIG, _from_model_config=True)


def _generation_ends(folder: Path) -> set[int]:
    """Return the tokens at which transformers' ``generate`` ends, if a file states them."""
    if (folder / GENERATION).is_file():
        stated = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        stated = json.loads((folder / CONFIG).read_text()).get("eos_token_id")
    return _listed(stated)


def _ends(folder: Path, name: str) -> set[int]:
    file = folder / name
    return _listed(json.loads(file.read_text()).get("eos_token_id")) if file.is_file() else set()


def _listed(value: Any) -> set[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    return {token_id for token_id in listed if token_id >= 0}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from warnings and progress bars: its fallbacks are what is compared."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.set_verbosity(before)
