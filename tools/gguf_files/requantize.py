"""Writes a model's GGUF file with its quantised matrices in another kind.

    python -P -m tools.gguf_files.requantize smollm2 out.gguf Q5_0

It knows the kinds that the gguf package can quantise to; what the file had lost before stays lost. Comparing the
perplexity of both files shows what the kind costs. It also shows that its blocks are multiplied correctly.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter, ReaderTensor
from gguf.quants import dequantize, quantize

from pdserve.model_files.model_path import resolve_model

from .fields import copy_field

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)


def main() -> None:
    """Requantise the model that the command line names into a new GGUF file, and print the file's size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, as the server takes it")
    parser.add_argument("path", type=Path)
    parser.add_argument("kind", choices=KINDS)
    args = parser.parse_args()
    requantize(resolve_model(args.model).path, args.path, Kind[args.kind])
    print(f"{args.path}: {args.path.stat().st_size / 2**20:.0f} MiB")


def requantize(source: Path, path: Path, kind: Kind) -> None:
    """Write a copy of the GGUF file ``source`` to ``path``, with each quantised matrix converted to ``kind``.

    Metadata and tensors that are not quantised stay the same.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name in reader.fields:
        # The writer has written the architecture, and counts for itself what the header counts.
        if name != "general.architecture" and not name.startswith("GGUF."):
            copy_field(reader, writer, name)
    for tensor in reader.tensors:
        _copy_tensor(writer, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tensor(writer: GGUFWriter, tensor: ReaderTensor, kind: Kind) -> None:
    if tensor.tensor_type in PLAIN:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    else:
        blocks = quantize(dequantize(tensor.data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, blocks, raw_dtype=kind)


if __name__ == "__main__":
    main()
