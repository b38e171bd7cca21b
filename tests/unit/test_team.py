"""A team with fewer cores than threads, and one that the system does not give all its threads."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pdserve.model_runner.forward_batch import ForwardBatch
from pdserve.model_runner.kernels.build import BuildError
from pdserve.model_runner.kernels.library import load_library
from pdserve.model_runner.model_runner import ModelRunner
from pdserve.model_runner.placement import plan_placement
from pdserve.runtime.machine.topology import read_machine
from pdserve.runtime.options import ServerOptions

try:
    load_library()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)

PAGE, VOCAB, PROMPT = 16, 4096, 64
PASSES = 10
DEARER = 12
"""A decode on many threads took 1.1 to 4.3 times the CPU time of one thread alone, which is waking each other up and
dearer beside other work; spinning at barriers, 58 to 126 times.
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


def run(folder: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], list[float]]:
    """Logits of a prompt and of a decode, and the CPU seconds of the cheapest pass of each.

    Of all threads together: a busy machine makes a pass take longer, but only spinning makes it cost more.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    options = ServerOptions(
        model_path=str(folder), load_format="dummy", attention_backend="cpu", dtype="float32", max_total_tokens=512
    )
    runner = ModelRunner(options, plan_placement(threads, None, read_machine()).spin_us)
    logits, seconds = [], []
    for batch in (make_batch(0, PROMPT), make_batch(PROMPT, 1)):
        times = []
        for _ in range(PASSES):
            begin = time.process_time()
            out = runner.forward(batch)
            times.append(time.process_time() - begin)
        logits.append(out)
        seconds.append(min(times))
    return logits, seconds


def test_sixteen_threads_on_few_cores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(read_machine().allowed) > 8:
        pytest.skip("this machine has too many cores to be crowded by 16 threads")
    alone, one = run(folder, 1, monkeypatch)
    together, sixteen = run(folder, 16, monkeypatch)
    for expected, actual in zip(alone, together, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert sixteen[-1] < DEARER * one[-1], (one, sixteen)


# A thread's stack is some megabytes of addresses: the first few of 64 fit, and the next one does not.
FEW = """
import os, resource, time
from pdserve.model_runner.errors import NotEnoughThreads
from pdserve.model_runner.kernels.team import Team

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
limit = time.monotonic() + 10
while threads() != before:
    assert time.monotonic() < limit, (threads(), before)
Team(2).close()
"""


def test_threads_that_are_not_to_be_had_are_an_error_and_leave_none_behind() -> None:
    done = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "does not give 64 compute threads" in done.stdout
    assert "--threads" in done.stdout
