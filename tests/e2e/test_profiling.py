"""``POST /start_profile`` on real instances: one rank, and two that compute together."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.processes import ONE_THREAD, Launched, launched, wait_until

PROMPT = [(7 * i) % 90 + 3 for i in range(40)]


def ask(server: Launched, count: int) -> list[int]:
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return server.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"]


def steps_in(path: str) -> list[str]:
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("step ")]


# Of the unit tests, model_runner/test_profiling.py records real steps, and server/test_http_admin.py has the answers.
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_traces_of_the_next_steps(tmp_path, tiny_args, ranks) -> None:
    folder = tmp_path / "traces"
    args = [*ONE_THREAD] if ranks == 1 else ["--tp-size", "2", "--threads", "2"]
    with launched(tmp_path, "i", "server", *tiny_args, *args, "--profile-dir", str(folder)) as server:
        server.wait_healthy()
        before = ask(server, 8)
        assert server.post("/stop_profile", {}).status_code == 409
        assert server.post("/start_profile", {"output_dir": str(tmp_path)}).status_code == 400
        started = server.post("/start_profile", {"output_dir": "first", "num_steps": 4}).json()
        assert started["folder"] == str(folder / "first")
        assert started["files"] == [str(folder / "first" / f"rank-{rank}.trace.json.gz") for rank in range(ranks)]
        second = server.post("/start_profile", {})
        assert (second.status_code, "/stop_profile" in second.json()["error"]["message"]) == (409, True)
        assert server.info()["profile"]["state"] == "recording"
        assert ask(server, 8) == before
        wait_until(lambda: server.info()["profile"]["state"] == "idle", 30, "the profile has ended by itself")
        stopped = server.post("/stop_profile", {}).json()
        assert (stopped["files"], stopped["ended_by"]) == (started["files"], "num_steps")
        assert stopped["bytes"] == sum(Path(path).stat().st_size for path in stopped["files"])
        # With overlap a step may have been sent already when the last one is planned.
        assert 4 <= stopped["steps"] <= 5
        found = [steps_in(path) for path in stopped["files"]]
        assert [len(names) for names in found] == [stopped["steps"]] * ranks
        assert all(names == found[0] for names in found)
        assert any(name.endswith("1 entries, 1 tokens") for name in found[0])

        server.post("/start_profile", {"output_dir": "second"})
        ask(server, 2)
        stopped = server.post("/stop_profile", {}).json()
        assert (stopped["ended_by"], stopped["folder"]) == ("request", str(folder / "second"))
        assert server.post("/start_profile", {"output_dir": "second"}).status_code == 409
        assert ask(server, 8) == before
