"""A whole server in real control groups: half a core and 2 GiB."""

from __future__ import annotations

import pytest
from support.control_groups import limited_group
from support.processes import launched

GIB = 2**30
STARTUP_SECONDS = 240.0
"""Half a core takes its time over six interpreters and torch: 25 s on an idle machine."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", ["tiny", pytest.param("real", marks=pytest.mark.slow)])
def test_half_a_core_and_2_gib(tmp_path, tiny_args, model):
    with limited_group(cores=0.5, memory=2 * GIB) as groups:
        args = tiny_args if model == "tiny" else []
        with launched(tmp_path, "limited", "server", *args, groups=groups) as server:
            server.wait_healthy(STARTUP_SECONDS)
            body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
            answer = server.generate(**body)
            assert answer["meta_info"]["completion_tokens"] == 8
            machine, pool = server.info()["machine"], server.info()["pool"]
            assert (machine["threads"], machine["cpu_quota"], machine["memory_total"]) == (1, 0.5, 2 * GIB)
            assert "1 compute thread on cores" in machine["reason"]
            assert "a CPU quota of 0.5 cores; " in machine["reason"]
            assert "of 2.0 GiB of memory free" in machine["reason"]
            assert machine["reason"] in server.log()
            assert pool["total"] > 1000
