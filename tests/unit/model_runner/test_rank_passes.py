"""What the ranks of a model compute, as threads: on both engines, with what is peculiar to a shared pool."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.machine import limit
from support.passes import forward
from support.rank_threads import make_ranks, together
from transformers import LlamaConfig, LlamaForCausalLM

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.batch.hidden import HostHidden
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.server.options import ServerOptions

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

PAGE, LENGTH = 16, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of one KV head, which every rank has."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(path)
    return path


def options(folder: Path, engine: str) -> ServerOptions:
    return ServerOptions(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        page_size=PAGE,
        max_total_tokens=256,
        handover="on",
        attention_backend="cpu" if engine == "cpu" else "torch",
    )


def prompt() -> ForwardBatch:
    """Return a prompt with a last page that is partly filled, and with all logits wanted."""
    table = torch.arange(64, dtype=torch.int32)[None] + PAGE
    positions = torch.arange(LENGTH)
    return ForwardBatch(
        input_ids=positions * 37 % 101,
        positions=positions,
        out_cache_loc=table[0, :LENGTH].long(),
        rows=torch.zeros(1, dtype=torch.int64),
        starts=[0],
        q_lens=[LENGTH],
        req_to_token=table,
        logit_indices=positions,
    )


def run(runner: LoadedModel) -> torch.Tensor:
    """Return all logits of a prompt."""
    return forward(runner.engine, prompt())


def run_hidden(runner: LoadedModel, logits_at: tuple[int, ...] = (LENGTH - 1, 3)) -> torch.Tensor:
    """Return the hidden states of a prompt's tokens, the last one's first, with some logits between them."""
    batch = prompt().on_host()
    batch.logit_indices = np.array(logits_at, dtype=np.int64)
    batch.hidden = HostHidden(np.array([*range(LENGTH - 1, -1, -1), 3]))
    logits = runner.engine.host_logits(batch)
    assert logits.shape == (len(logits_at), 101)
    return torch.from_numpy(batch.hidden.states)


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_does(engine: str, size: int, folder: Path) -> None:
    expected = run(load_model(options(folder, engine)))
    torch.testing.assert_close(together(make_ranks(size, options(folder, engine)), run), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_who_is_late_clears_nothing_that_another_has_written(engine: str, folder: Path) -> None:
    """Both ranks write the same head of a page that they begin. The first may not until the second has cleared it."""
    expected = run(load_model(options(folder, engine)))
    first, second = make_ranks(2, options(folder, engine))
    is_waiting, may_clear = threading.Event(), threading.Event()
    clear, written = second.pools.pool.clear, []

    def late(pages: torch.Tensor) -> None:
        is_waiting.set()
        assert may_clear.wait(limit(20))
        clear(pages)

    second.pools.pool.clear = late  # type: ignore[method-assign]

    def watch() -> None:
        assert is_waiting.wait(limit(20))
        # The first has all the time that it needs to write, were it not to wait.
        written.append(wait_for_keys(first, 0.3))
        may_clear.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = together([first, second], run)
    watcher.join(limit(20))
    assert written == [False]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def wait_for_keys(runner: LoadedModel, seconds: float) -> bool:
    """Return whether anything is written to the pool within ``seconds``."""
    end = threading.Event()
    timer = threading.Timer(seconds, end.set)
    timer.start()
    while not end.is_set():
        if bool(runner.pools.pool.data[1:].any()):
            return True
    return False


@pytest.mark.parametrize("logits_at", [(), (LENGTH - 1, 3)])
@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_ranks_have_the_hidden_states_of_one(engine: str, logits_at: tuple[int, ...], folder: Path) -> None:
    read = partial(run_hidden, logits_at=logits_at)
    expected = read(load_model(options(folder, engine)))
    assert expected.shape == (LENGTH + 1, 64)
    assert torch.equal(expected[-1], expected[LENGTH - 1 - 3])
    torch.testing.assert_close(together(make_ranks(2, options(folder, engine)), read), expected, atol=1e-5, rtol=1e-5)
