"""A team with fewer cores than threads, and one that the system does not give all its threads."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.machine import limit
from support.passes import forward

from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.cpu_engine.build import BuildError
from pdserve.model_runner.cpu_engine.library import load_library
from pdserve.model_runner.device.placement import SPIN_US, plan_placement
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.load_setup import Threads
from pdserve.model_runner.engines.loaded import LoadedModel
from pdserve.runtime.machine.topology import read_machine
from pdserve.server.options import ServerOptions

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

PAGE, VOCAB, PROMPT = 16, 4096, 64
PASSES = 4
SPIN_IS_DEARER = 2
"""Factor between the CPU times of a decode with spinning and with sleeping threads, measured in turns.

A decode on 16 threads that spin at barriers took 58 to 126 times the CPU time of one thread alone. On 16 that sleep and
wake each other up it took 1 to 4 times as much, and 12 beside much other work. Other work makes both more expensive, so
one is compared with the other.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    config.architectures = ["LlamaForCausalLM"]
    path = tmp_path_factory.mktemp("model")
    config.save_pretrained(path)
    return path


def make_batch(start: int, q_len: int) -> ForwardBatch:
    positions, table = torch.arange(start, start + q_len), (torch.arange(PAGE, 512))[None].int()
    return ForwardBatch(
        input_ids=positions * 31 % VOCAB,
        positions=positions,
        out_cache_loc=table[0, positions].long(),
        rows=torch.zeros(1, dtype=torch.int64),
        starts=[start],
        q_lens=[q_len],
        req_to_token=table,
        logit_indices=torch.tensor([q_len - 1]),
    )


def make_runner(folder: Path, threads: int, spin_us: int, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    options = ServerOptions(
        model_path=str(folder), load_format="dummy", attention_backend="cpu", dtype="float32", max_total_tokens=512
    )
    return load_model(options, Threads(spin_us))


def cpu_seconds(runner: LoadedModel, batch: ForwardBatch) -> float:
    """Return CPU seconds of all threads. A busy machine makes a pass slower, but spinning makes it cost far more."""
    begin = time.process_time()
    forward(runner.engine, batch)
    return time.process_time() - begin


def test_sixteen_threads_on_few_cores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = read_machine()
    if len(machine.allowed) > 8:
        pytest.skip("this machine has too many cores to be crowded by 16 threads")
    alone = make_runner(folder, 1, SPIN_US, monkeypatch)
    planned = make_runner(folder, 16, plan_placement(16, None, machine).spin_us, monkeypatch)
    spinning = make_runner(folder, 16, SPIN_US, monkeypatch)
    prompt, decode = make_batch(0, PROMPT), make_batch(PROMPT, 1)
    for batch in (prompt, decode):
        expected = forward(alone.engine, batch)
        for crowd in (planned, spinning):
            torch.testing.assert_close(forward(crowd.engine, batch), expected, rtol=0, atol=0)
    costs = [(cpu_seconds(planned, decode), cpu_seconds(spinning, decode)) for _ in range(PASSES)]
    sleeping, spin = (min(of) for of in zip(*costs, strict=True))
    assert SPIN_IS_DEARER * sleeping < spin, costs


# A thread's stack is some megabytes of addresses: the first few of 64 fit, and the next one does not.
FEW = """
import os, resource, time
from pdserve.model_runner.errors import NotEnoughThreads
from pdserve.model_runner.cpu_engine.team import Team

def threads():
    return len(os.listdir("/proc/self/task"))

Team(2).close()
before = threads()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
room = 4 * (stack if 0 < stack < 1 << 30 else 8 << 20)
resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
try:
    Team(64)
except NotEnoughThreads as e:
    print(e)
# A thread that was joined may stand in /proc a moment longer.
limit = time.monotonic() + 60
while threads() != before:
    assert time.monotonic() < limit, (threads(), before)
Team(2).close()
"""


def test_threads_that_are_not_to_be_had_are_an_error_and_leave_none_behind() -> None:
    done = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    assert "does not give 64 compute threads" in done.stdout
    assert "--threads" in done.stdout
