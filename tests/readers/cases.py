"""The readers of the product, each with good files, their damage, and what it must never accept."""

from __future__ import annotations

import json
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pdserve.detokenizer.request_decoder import make_decoder_factory
from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.model_files.checkpoint import tensor_sizes
from pdserve.model_files.context_length import with_context
from pdserve.model_files.model_impl import ModelImpl, choose_model_impl
from pdserve.model_files.model_limits import read_limits
from pdserve.model_files.model_path import ModelSource
from pdserve.model_files.packed_names import packing_of
from pdserve.model_files.pooling import read_pooling
from pdserve.model_files.sampling_defaults import read_sampling_defaults
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_files.text.chat_template import ChatTemplates
from pdserve.model_files.text.errors import PromptError
from pdserve.model_files.text.gguf_metadata import read_gguf_metadata
from pdserve.model_files.text.gguf_tokenizer import tokenizer_from_gguf
from pdserve.model_files.text.hf_files import find_eos_ids
from pdserve.model_files.text.hf_tokenizer import tokenizer_from_folder
from pdserve.model_files.text.limited_template import LimitedTemplate
from pdserve.model_files.text.named_templates import NamedTemplates
from pdserve.model_files.text.template_source import find_template_in_folder, read_json_object
from pdserve.model_files.text.text_tokenizer import TextTokenizer
from pdserve.model_runner.loader.load import load_model_weights

from . import faults, samples

TEXT = "Hello, w\u00f6rld! <tool> </s> 123\n"
CHATS = (
    Conversation([ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")], add_generation_prompt=True),
    Conversation([ChatMessage("user", "Hi"), ChatMessage("tool", "42"), ChatMessage("assistant", "")]),
)

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Reader(ABC):
    """One reader over files of its own."""

    file: Path
    """The file that is damaged."""
    good: Sequence[bytes]
    """Good contents of the file."""
    step = 1
    """Distance of the numbers of its cases."""

    def __init__(self, folder: Path) -> None:
        """Write the good files to ``folder``."""
        self.folder = folder

    @abstractmethod
    def damage(self, rng: random.Random, data: bytes) -> bytes:
        """Return ``data`` with damage."""

    @abstractmethod
    def read(self) -> None:
        """Read the file as a server does at its start."""

    def accepted_damage(self, good: bytes, broken: bytes) -> str | None:
        """Return what of ``broken`` should not have been accepted, or None."""
        return None


class JsonReader(Reader):
    """A reader of one JSON file in a folder that is otherwise good."""

    name = ""
    contents: tuple[object, ...] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        samples.write_folder(folder)
        self.file = folder / self.name
        self.good = [json.dumps(content).encode() for content in self.contents]

    def damage(self, rng: random.Random, data: bytes) -> bytes:
        """See ``Reader``."""
        return faults.damage_json(rng, data)


class ConfigReader(JsonReader):
    """config.json: what the model is."""

    name = "config.json"
    contents = (samples.CONFIG, *samples.OTHER_CONFIGS)

    def read(self) -> None:
        """See ``Reader``."""
        source = ModelSource("hf", self.folder)
        limits = read_limits(source, None)
        find_eos_ids(self.folder, None)
        if choose_model_impl("auto", source) is ModelImpl.NATIVE:
            with_context(read_spec(source), limits.context_length)
        packing_of(self.folder)


class GenerationReader(JsonReader):
    """generation_config.json: sampling defaults and ends of text."""

    name = "generation_config.json"
    contents = (samples.GENERATION,)

    def read(self) -> None:
        """See ``Reader``."""
        read_sampling_defaults(ModelSource("hf", self.folder))
        find_eos_ids(self.folder, 1)


class ModulesReader(JsonReader):
    """modules.json: the pooling of embeddings."""

    name = "modules.json"
    contents = (samples.MODULES,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "1_Pooling").mkdir(exist_ok=True)
        samples.write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})

    def read(self) -> None:
        """See ``Reader``."""
        read_pooling(ModelSource("hf", self.folder))


class TokenizerConfigReader(JsonReader):
    """tokenizer_config.json: named tokens, added tokens, chat template."""

    name = "tokenizer_config.json"
    contents = (samples.TOKENIZER_CONFIG, {**samples.TOKENIZER_CONFIG, "chat_template": samples.TEMPLATE})

    def read(self) -> None:
        """See ``Reader``."""
        tokenizer = tokenizer_from_folder(self.folder)
        _use(tokenizer)
        if tokenizer.chat_template is not None:
            ChatTemplates(tokenizer.chat_template, tokenizer.special_tokens)


class TokenizerReader(JsonReader):
    """tokenizer.json."""

    name = "tokenizer.json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tokenizers = (samples.byte_level_tokenizer(), *samples.other_tokenizers())
        self.good = [tokenizer.to_str().encode() for tokenizer in tokenizers]

    def read(self) -> None:
        """See ``Reader``."""
        _use(tokenizer_from_folder(self.folder))


class TemplateReader(Reader):
    """A chat template in a file of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        samples.write_folder(folder)
        self.file = folder / "chat_template.jinja"
        self.good = [samples.TEMPLATE.encode()]

    def damage(self, rng: random.Random, data: bytes) -> bytes:
        """See ``Reader``."""
        return faults.damage_template(rng, data)

    def read(self) -> None:
        """See ``Reader``."""
        _render(ChatTemplates(self._source(), SPECIAL_TOKENS))

    def _source(self) -> NamedTemplates:
        source = find_template_in_folder(self.folder, read_json_object(self.folder / "tokenizer_config.json"))
        assert source is not None, "the file is there"
        return source


class LimitedTemplateReader(TemplateReader):
    """The files of ``TemplateReader``, read as the product does: in a process of their own, with its limits."""

    step = 50

    def read(self) -> None:
        """See ``Reader``. The process has to answer after the template, however it behaved."""
        template = LimitedTemplate()
        try:
            template.load(self._source(), SPECIAL_TOKENS)
            _render(template)
        finally:
            template.close()


class WeightsReader(Reader):
    """A reader of weights: reads sizes first, as ``pdserve check`` does, then all numbers."""

    source: ModelSource

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        torch.set_num_threads(1)

    def read(self) -> None:
        """See ``Reader``."""
        tensor_sizes(self.source)
        load_model_weights(self._targets(), self.source, self._spec, "auto", 0)

    def _open(self) -> None:
        from pdserve.model_runner.models.decoder import Decoder

        self._spec = read_spec(self.source)
        decoder = Decoder(self._spec, torch.float32, torch.device("cpu"))
        self._targets: Callable[[], Any] = decoder.weights


class SafetensorsReader(WeightsReader):
    """The only file of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        samples.write_folder(folder)
        self.file = folder / "model.safetensors"
        self.source = ModelSource("hf", folder)
        self.good = [self.file.read_bytes()]
        self._open()

    def damage(self, rng: random.Random, data: bytes) -> bytes:
        """See ``Reader``."""
        return faults.damage_safetensors(rng, data)

    def accepted_damage(self, good: bytes, broken: bytes) -> str | None:
        """See ``Reader``: another place, shape or size of numbers of a tensor, or two entries of it."""
        before, after = _entries(good), _entries(broken)
        places = dict(after)
        for name, entry in before:
            if (found := places.get(name)) is None:
                return f"{name} is missing"
            # Types of one size, and two tensors of one shape that changed places, can't be told apart.
            swapped = any(found["data_offsets"] == other["data_offsets"] for _, other in before)
            if found["shape"] != entry["shape"] or not swapped:
                return f"{name} is {found}, was {entry}"
        return None


class IndexReader(WeightsReader):
    """The index of a checkpoint in two files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        samples.write_shards(folder)
        self.file = folder / "model.safetensors.index.json"
        self.source = ModelSource("hf", folder)
        self.good = [self.file.read_bytes()]
        self._open()

    def damage(self, rng: random.Random, data: bytes) -> bytes:
        """See ``Reader``."""
        return faults.damage_json(rng, data)


class GGUFReader(WeightsReader):
    """A GGUF file with its tokenizer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = folder / "model.gguf"
        samples.write_gguf(self.file)
        self.source = ModelSource("gguf", self.file)
        self.good = [self.file.read_bytes()]
        self._fields = faults.gguf_fields(self.good[0])
        self._open()

    def damage(self, rng: random.Random, data: bytes) -> bytes:
        """See ``Reader``."""
        return faults.damage_gguf(rng, data, self._fields)

    def read(self) -> None:
        """See ``Reader``."""
        _use(tokenizer_from_gguf(read_gguf_metadata(self.file)))
        read_limits(self.source, None)
        super().read()

    def accepted_damage(self, good: bytes, broken: bytes) -> str | None:
        """See ``Reader``: another place, shape or type of a tensor."""
        before, after = _gguf_tensors(good), _gguf_tensors(broken)
        return next(
            (f"{name} is {after.get(name)}, was {place}" for name, place in before.items() if after.get(name) != place),
            None,
        )


READERS: dict[str, type[Reader]] = {
    "config": ConfigReader,
    "generation-config": GenerationReader,
    "modules": ModulesReader,
    "tokenizer": TokenizerReader,
    "tokenizer-config": TokenizerConfigReader,
    "template": TemplateReader,
    "limited-template": LimitedTemplateReader,
    "safetensors": SafetensorsReader,
    "index": IndexReader,
    "gguf": GGUFReader,
}
"""Readers by name."""
LIMITED_READERS = {"template": "limited-template"}
"""Readers that may take too much, and those that read the same files within the product's own limits."""


def _render(template: ChatTemplates | LimitedTemplate) -> None:
    """Render all conversations. One that a template refuses is answered, so its message names no file."""
    for chat in CHATS:
        try:
            template.render(chat)
        except PromptError:
            continue


def _use(tokenizer: TextTokenizer) -> None:
    """Use a tokenizer as the two text processes do."""
    try:
        [ids] = tokenizer.encode_batch([TEXT], add_special_tokens=True)
    except PromptError:
        return  # a client gets an answer
    assert tokenizer.max_token_bytes >= 0
    factory = make_decoder_factory(tokenizer)
    for skip in (True, False):
        tokenizer.decode([*ids, *range(0, 300, 7)], skip_special_tokens=skip)
        decoder = factory.start(unpack_i32(pack_i32(ids[:2])), skip_special_tokens=skip)
        decoder.decode(ids)
        decoder.flush()
    factory.token_bytes(5)


def _entries(data: bytes) -> list[tuple[str, Any]]:
    (length,) = struct.unpack_from("<Q", data)
    pairs = json.loads(data[8 : 8 + length], object_pairs_hook=lambda pairs: pairs)
    return [(name, dict(entry)) for name, entry in pairs if name != "__metadata__"]


def _gguf_tensors(data: bytes) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Return shape, type, and place from the end of the file of each tensor, read plainly."""
    at = 24
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    alignment = 32

    def number(size: int) -> int:
        nonlocal at
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def string() -> str:
        nonlocal at
        length = number(8)
        at += length
        return data[at - length : at].decode()

    def value(kind: int) -> int | None:
        if kind == 9:
            element = number(4)
            for _ in range(number(8)):
                value(element)
            return None
        return number(sizes[kind]) if kind != 8 else (string(), None)[1]

    for _ in range(int.from_bytes(data[16:24], "little")):
        key = string()
        found = value(number(4))
        if key == "general.alignment" and found is not None:
            alignment = found
    tensors = {}
    for _ in range(int.from_bytes(data[8:16], "little")):
        name = string()
        shape = tuple(number(8) for _ in range(number(4)))
        tensors[name] = (shape, number(4), number(8))
    start = -(-at // alignment) * alignment
    return {name: (shape, kind, len(data) - start - offset) for name, (shape, kind, offset) in tensors.items()}
