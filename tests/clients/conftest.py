"""A pair with the real model, and the environment that ``make test-clients`` made for the clients.

With ``--record`` everything they send to the router is kept for ``tests/unit/router/test_recorded_payloads.py``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import MODEL
from support.processes import Pair, pd_pair
from support.quick_gguf import quick_gguf
from support.recorder import recording

collect_ignore = ["inside"]
"""Folder of tests that run in the clients' own environments."""
PAYLOADS = Path(__file__).parents[1] / "unit" / "payloads"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help=f"write what clients send into {PAYLOADS}")


@pytest.fixture(scope="session")
def running_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """In float32, so that scores can be those of transformers; everything comes back in the end."""
    with pd_pair(tmp_path_factory.mktemp("pair"), "tcp", "--dtype", "float32") as pair:
        yield pair
        pair.assert_all_returned()


@pytest.fixture
def pair(running_pair: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The pair; with ``--record`` its router's address is that of a recorder before it."""
    if not request.config.getoption("--record"):
        yield running_pair
        return
    with recording(running_pair.router.url) as recorder:
        recorder.client = re.sub(r"\W+", "-", request.node.name.removeprefix("test_")).strip("-")
        yield dataclasses.replace(running_pair, router=dataclasses.replace(running_pair.router, port=recorder.port))
    if request.path.name in ("test_packages.py", "test_load_generators.py"):  # the others' own requests are ours
        PAYLOADS.mkdir(exist_ok=True)
        recorder.write(PAYLOADS)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The served model as a Hugging Face folder: the same weights, dequantised to float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pdserve.model_files.model_path import resolve_model

    file = resolve_model(MODEL).path
    folder = tmp_path_factory.mktemp("model")
    with quick_gguf():
        dequantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    # One that was loaded from a GGUF counts as quantised and refuses to be saved; one of the same shape does not.
    config = dequantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dequantised.state_dict())
    model.save_pretrained(folder)
    return folder
