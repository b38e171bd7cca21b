"""A GGUF file in memory, to be changed and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from support.gguf_export import write_gguf

from .bases import MERGES, make_model, make_tokenizer

ARCHITECTURE = "general.architecture"
TYPES = {
    str: GGUFValueType.STRING,
    bool: GGUFValueType.BOOL,
    float: GGUFValueType.FLOAT32,
    list: GGUFValueType.ARRAY,
    int: GGUFValueType.UINT32,
}


@dataclass
class GGUFParts:
    """``metadata`` by key, ``tensors`` by name, and ``bytes_before`` → after: text that is replaced in the file."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]
    replaced: dict[bytes, bytes] = field(default_factory=dict)
    length: int | None = None
    """Number of bytes that are kept; None: all."""
    behind: bytes = b""

    def copy(self) -> GGUFParts:
        """Return parts that can be changed without changing these."""
        return GGUFParts(dict(self.metadata), dict(self.tensors), dict(self.replaced))

    def key(self, name: str) -> str:
        """Return the key of the architecture."""
        return f"{self.metadata[ARCHITECTURE]}.{name}"

    def write(self, path: Path) -> None:
        """Write the file."""
        writer = GGUFWriter(path, self.metadata[ARCHITECTURE])
        for key, value in self.metadata.items():
            if key != ARCHITECTURE:
                writer.add_key_value(key, value, TYPES[type(value)])
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        data = path.read_bytes()
        for before, after in self.replaced.items():
            data = data.replace(before, after, 1)
        path.write_bytes(data[: self.length] + self.behind)


@cache
def make_parts(base: str) -> GGUFParts:
    """Make the parts of a base's GGUF, with its tokenizer. Its callers must not change them."""
    with TemporaryDirectory() as folder:
        reader = GGUFReader(write_gguf(make_model(base), Path(folder) / "m.gguf"))
        fields = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
        # A reader's shapes begin with the last dimension; its arrays don't.
        tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    vocab = sorted(make_tokenizer().get_vocab().items(), key=lambda pair: pair[1])
    tokens = [token for token, _ in vocab]
    fields |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(gguf.TokenType.NORMAL)] * 264 + [int(gguf.TokenType.CONTROL)] * 3,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 264,
        "tokenizer.ggml.eos_token_id": 265,
        "tokenizer.ggml.padding_token_id": 266,
        "tokenizer.ggml.add_bos_token": True,
    }
    return GGUFParts(fields, tensors)
