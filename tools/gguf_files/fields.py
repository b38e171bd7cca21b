"""Metadata from one GGUF file to another."""

from __future__ import annotations

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def copy_field(reader: GGUFReader, writer: GGUFWriter, name: str) -> None:
    """Copy the metadata field ``name`` of ``reader``, with its type, to ``writer``."""
    field = reader.fields[name]
    kind = field.types[0]
    of_items = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, of_items)
