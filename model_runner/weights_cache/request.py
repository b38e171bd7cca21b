"""A model to pack, and the key of everything that its packed weights depend on. Does not import torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...model_files.checkpoint import checkpoint_files
from ...model_files.context_length import choose_context_length, with_context, without_idle_windows
from ...model_files.model_path import ModelSource, resolve_model
from ...model_files.sharding import Shard, shard
from ...model_files.spec import ModelSpec
from ...model_files.spec_reader import read_spec
from ..cpu_engine.build import choose_level, library_path
from ..cpu_engine.packed_model import FORMAT
from ..options import WorkerOptions

PACKAGE = Path(__file__).parents[2]
PACKING_CODE = tuple(
    PACKAGE / place
    for place in ("model_files", *(f"model_runner/{part}" for part in ("loader", "ops", "cpu_engine", "dtypes.py")))
)
"""Folders and files with the code that decides what the packed weights are, beside this folder."""
LIBRARIES = ("torch", "gguf", "safetensors", "numpy")
"""Packages that read, round or draw weights."""
ROTATION_STEP = 1024
"""Tables of rotations have a multiple of this many positions."""


class SourceFile(NamedTuple):
    """What tells a file from others, and from itself after a change."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


class WeightsName(NamedTuple):
    """What tells a packed model from others, in three parts."""

    model: str
    """The model's path."""
    source: str
    """State of its files."""
    variant: str
    """How they are packed, and by which code."""

    @property
    def key(self) -> str:
        """Name of the packed model's file, made of all three parts."""
        return "-".join(self)


@dataclass(frozen=True)
class PackRequest:
    """A model to pack, as the C++ engine needs it."""

    options: WorkerOptions
    source: ModelSource
    spec: ModelSpec
    """Description of the whole model."""
    identity: ModelSpec
    """Description by which instances recognise each other."""
    shard: Shard | None
    """Part of the model that is packed; None: all of it."""
    dtype: str
    """Name of the type of weights and activations."""
    kv_dtype: str
    """Name of the type of the KV pool's elements."""
    node: int | None = None
    """NUMA node that computes with the weights; None: the host has one node, or the threads are on several."""

    @property
    def own_spec(self) -> ModelSpec:
        """Description of the part of the model that is packed: this rank's, or the whole."""
        return self.spec if self.shard is None else self.shard.spec

    @property
    def positions(self) -> int:
        """Number of positions that rotations are computed for: the context length, rounded up."""
        return -(-self.spec.context_length // ROTATION_STEP) * ROTATION_STEP

    @property
    def path(self) -> str:
        """Path of the model's files, without links."""
        return os.path.realpath(self.source.path)

    @property
    def source_bytes(self) -> int:
        """Bytes on disk of the files that weights are read from; 0 for random weights. Raises ``OSError``."""
        return sum(file.size for file in _states(self._weight_files()))

    def name(self) -> WeightsName:
        """Return digests of all that the packed weights depend on: the model's path, its files, options and code.

        Raises ``ModelError``, ``BuildError`` or ``OSError``.
        """
        options, part = self.options, self.shard
        variant = (
            *(FORMAT, library_path(choose_level()).name, code_digest(), [version_of(name) for name in LIBRARIES]),
            *(asdict(self.spec), asdict(self.identity), self.dtype, self.kv_dtype, options.dtype),
            *(options.quantization, options.quantized_activations, options.load_format),
            options.random_seed if options.load_format == "dummy" else 0,
            None if part is None else (part.rank, part.size),
            self.node,
        )
        return WeightsName(_digest(self.path), _digest(list(_states(self._files()))), _digest(variant))

    def _files(self) -> list[Path]:
        """Return the files that the packed weights depend on: the model's description, and the weights."""
        path = self.source.path
        # A GGUF describes the model itself, also if its weights are not read.
        return [path] if self.source.kind == "gguf" else [path / "config.json", *self._weight_files()]

    def _weight_files(self) -> list[Path]:
        """Return the files that weights are read from; none if weights are random."""
        if self.options.load_format == "dummy":
            return []
        path = self.source.path
        return [path] if self.source.kind == "gguf" else checkpoint_files(path)


class PackOrder(msgspec.Struct, frozen=True):
    """A ``PackRequest`` for another process, which reads the model's description anew."""

    options: dict[str, object]
    dtype: str
    kv_dtype: str
    node: int | None
    rank: int
    size: int
    threads: int
    """Number of threads that pack."""
    fd: int
    """Descriptor of the empty file to write."""
    parent: int
    """Process that waits."""

    def read(self) -> PackRequest:
        """Return the ``PackRequest`` that a parent process has described in these fields, for the process that packs.

        The model's description is read again. Downloads nothing. Raises ``ModelError``.
        """
        options = msgspec.convert(self.options, WorkerOptions)
        source = resolve_model(
            options.model_path, revision=options.revision, weights=options.load_format != "dummy", download=False
        )
        described = read_spec(source)
        identity = with_context(described, choose_context_length(described, options.context_length))
        spec = without_idle_windows(identity)
        part = None if self.size == 1 else shard(spec, self.rank, self.size)
        return PackRequest(options, source, spec, identity, part, self.dtype, self.kv_dtype, self.node)


def _states(files: Iterable[Path]) -> Iterator[SourceFile]:
    for file in files:
        place = os.path.realpath(file)
        state = os.stat(place)
        yield SourceFile(place, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev)


def code_digest() -> str:
    """Return a digest of all Python sources that decide what the packed weights are."""
    digest = hashlib.sha256()
    for place in (*PACKING_CODE, Path(__file__).parent):
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            digest.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
    return digest.hexdigest()


def version_of(package: str) -> str:
    """Return the installed version of a Python package, or "" if it is not installed. Does not import it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
