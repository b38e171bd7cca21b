"""What the process that packs weights imports: torch only for what needs it, and the log says for what."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from support.families import make_reference
from support.machine import limit
from support.packed_checkpoints import packed_checkpoint

from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.weights_cache.request import PackOrder
from pdserve.server.options import ServerOptions

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

PACK = """
import json, logging, os, sys
import msgspec
from pdserve.model_runner.weights_cache import build_process
order = msgspec.json.decode(sys.argv[1].encode(), type=build_process.PackOrder)
answer = build_process._build(msgspec.structs.replace(order, fd=os.memfd_create("weights")))
assert not answer.error, answer.error
print(json.dumps([name for name in ("torch", "transformers", "scipy") if name in sys.modules]))
"""


class Packed(msgspec.Struct):
    """Heavy packages that were imported, and the log."""

    imported: list[str]
    log: str


def pack(model: str, **options: str) -> Packed:
    """Pack a model in a process of its own, into memory."""
    asked = ServerOptions(model_path=model, device="cpu", **options)  # type: ignore[arg-type]
    order = PackOrder(asdict(asked), "bfloat16", "bfloat16", None, 0, 1, 1, 0, 0)
    command = [sys.executable, "-P", "-c", PACK, msgspec.json.encode(order).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    return Packed(json.loads(done.stdout.splitlines()[-1]), done.stderr)


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_the_default_model_is_packed_without_torch(quantization: str) -> None:
    """Importing torch took most of the first start of a model."""
    assert pack("smollm2", quantization=quantization).imported == []


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_checkpoint_is_packed_without_torch(quantization: str, tmp_path: Path) -> None:
    make_reference("qwen2-moe").bfloat16().save_pretrained(tmp_path)
    assert pack(str(tmp_path), quantization=quantization).imported == []


def test_the_log_says_what_torch_is_imported_for(tmp_path: Path) -> None:
    make_reference("llama").save_pretrained(tmp_path / "plain")
    packed = packed_checkpoint(tmp_path / "plain", tmp_path, "fp8 rows").source.path
    for model, options, reason in (
        (tmp_path / "plain", {"load_format": "dummy"}, "random weights"),
        (packed, {}, "weights in FP8"),
    ):
        found = pack(str(model), **options)
        assert found.imported == ["torch"]
        assert f"torch is imported for {reason}" in found.log
