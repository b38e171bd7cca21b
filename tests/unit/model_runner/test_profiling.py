"""``/start_profile`` and ``/stop_profile``: one bounded profile at a time, into a folder that no client chooses."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.fake_engine import FakeEngine, with_engine
from support.machine import limit
from support.sim import Sent
from support.tiny_model import CONFIG

from pdserve.messages.base import pack_i32
from pdserve.messages.profiling import (
    MAX_STACK_STEPS,
    MAX_STEPS,
    ProfileResult,
    ProfileStarted,
    ProfileWritten,
    StartProfile,
    StartProfileReq,
    StopProfile,
    StopProfileReq,
)
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.worker import ForwardStep, RowInit
from pdserve.model_runner import profiler as profiler_module
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.page_mover import NoPageMover
from pdserve.model_runner.profiler import Profiler, RankProfiler, profile_folder
from pdserve.model_runner.ranks.other_ranks import NoOtherRanks
from pdserve.model_runner.steps.step_queue import StepQueue
from pdserve.model_runner.steps.step_runner import StepRunner
from pdserve.runtime.python import python_command
from pdserve.scheduler.features.profiling import MAX_SECONDS, ProfileState, Profiling
from pdserve.scheduler.handlers import Handlers
from pdserve.scheduler.outbox import Outbox
from pdserve.server.http.admin.profiling import ProfileStartedAnswer as StartAnswer
from pdserve.server.http.admin.profiling import ProfileStoppedAnswer as StopAnswer
from pdserve.server.options import ServerOptions

START = StartProfileReq("name", 4, id=1)
STARTED = ProfileStarted("/folder/name", ["/folder/name/rank-0.trace.json.gz"], ["CPU"])
WRITTEN = ProfileWritten(STARTED.files, 12)


class Rig:
    """The scheduler's part, and what it says to the worker and to HTTP. ``step`` is the newest step's number."""

    def __init__(self) -> None:
        self.worker, self.http = Sent(), Sent()
        self.outbox = Outbox(self.worker, self.http)
        self.step = 10
        self.profiling = Profiling(self.outbox, lambda: self.step)

    def tell(self, message: Any, now: float) -> None:
        """Pass on a question or an event."""
        Handlers(self.outbox, self.profiling).handle(message, now)

    def commands(self) -> list[Any]:
        """Return what the worker was told since the last call."""
        return self._take(self.worker.messages)

    def answers(self) -> list[Any]:
        """Return what HTTP was told since the last call."""
        return self._take(self.http.messages)

    def _take(self, messages: deque[Any]) -> list[Any]:
        self.outbox.flush()
        taken = list(messages)
        messages.clear()
        return taken

    def record(self) -> None:
        """Begin a profile at second 0."""
        self.tell(START, 0.0)
        assert self.commands() == [StartProfile("name", [], False, False)]
        self.tell(STARTED, 0.0)
        [answer] = self.answers()
        assert (type(answer), answer.id, answer.files, answer.steps) == (ProfileResult, 1, STARTED.files, 4)


def test_a_profile_ends_by_itself_after_its_steps_and_tells_its_files_afterwards() -> None:
    rig = Rig()
    rig.record()
    rig.step += 3
    rig.profiling.tick(1.0)
    assert rig.commands() == []
    rig.step += 1
    rig.profiling.tick(2.0)
    rig.profiling.tick(2.0)
    assert rig.commands() == [StopProfile()]
    rig.tell(WRITTEN, 2.5)
    assert rig.answers() == []
    for id_ in (7, 8):
        rig.tell(StopProfileReq(id=id_), 3.0)
        [answer] = rig.answers()
        assert (type(answer), answer.id, answer.files) == (ProfileResult, id_, WRITTEN.files)
        assert (answer.steps, answer.seconds, answer.nbytes, answer.ended_by) == (4, 2.0, 12, "num_steps")
    assert rig.commands() == []


def test_a_profile_that_was_forgotten_ends_after_a_time_without_any_step() -> None:
    rig = Rig()
    assert rig.profiling.seconds_left(0.0) == float("inf")
    rig.record()
    assert rig.profiling.seconds_left(1.0) == MAX_SECONDS - 1.0
    rig.profiling.tick(MAX_SECONDS - 0.1)
    assert rig.commands() == []
    rig.profiling.tick(MAX_SECONDS)
    assert rig.commands() == [StopProfile()]
    assert rig.profiling.seconds_left(MAX_SECONDS) == float("inf")
    rig.tell(WRITTEN, MAX_SECONDS)
    rig.tell(StopProfileReq(id=2), 100.0)
    assert rig.answers()[0].ended_by == "time limit"


def test_a_second_start_is_refused_until_the_first_has_written() -> None:
    rig = Rig()
    second = StartProfileReq("other", 1, id=9)

    def refused(state: str) -> None:
        rig.tell(second, 0.5)
        [answer] = rig.answers()
        assert (answer.id, answer.status, rig.commands()) == (9, 409, [])
        assert state in answer.text
        assert '"name"' in answer.text

    rig.tell(START, 0.0)
    rig.commands()
    refused("starting")
    rig.tell(STARTED, 0.0)
    rig.answers()
    refused("recording")
    rig.tell(StopProfileReq(id=2), 1.0)
    rig.commands()
    refused("writing")
    rig.tell(WRITTEN, 1.0)
    rig.answers()
    rig.tell(second, 2.0)
    assert rig.commands() == [StartProfile("other", [], False, False)]


def test_stops_are_answered_when_the_files_are_there() -> None:
    rig = Rig()
    rig.record()
    rig.step += 2
    rig.tell(StopProfileReq(id=2), 1.5)
    rig.tell(StopProfileReq(id=3), 1.6)
    assert (rig.commands(), rig.answers()) == ([StopProfile()], [])
    rig.tell(WRITTEN, 2.0)
    answers = rig.answers()
    assert [(answer.id, answer.steps, answer.ended_by) for answer in answers] == [(2, 2, "request"), (3, 2, "request")]


def test_a_stop_that_comes_before_the_worker_records_ends_it_at_once() -> None:
    rig = Rig()
    rig.tell(START, 0.0)
    rig.tell(StopProfileReq(id=2), 0.1)
    rig.commands()
    rig.tell(STARTED, 0.2)
    assert rig.commands() == [StopProfile()]
    rig.tell(WRITTEN, 0.3)
    assert [answer.id for answer in rig.answers()] == [1, 2]


def test_what_fails_is_reported_and_the_next_profile_can_start() -> None:
    rig = Rig()
    rig.tell(StopProfileReq(id=1), 0.0)
    assert (rig.answers()[0].status, rig.commands()) == (409, [])
    rig.tell(START, 0.0)
    rig.tell(ProfileStarted(status=409, error="it is there already"), 0.1)
    [answer] = rig.answers()
    assert (answer.status, answer.text, rig.profiling.state) == (409, "it is there already", ProfileState.IDLE)
    rig.commands()
    rig.record()
    rig.tell(StopProfileReq(id=5), 1.0)
    rig.tell(ProfileWritten([], 0, "the disk is full"), 2.0)
    [answer] = rig.answers()
    assert (answer.id, answer.status, answer.text) == (5, 503, "the disk is full")
    assert rig.profiling.status(2.0)["profile"]["error"] == "the disk is full"


# --- the worker ---


class Worker:
    """A worker of a tiny model, with steps."""

    def __init__(self, folder: Path, backend: str = "torch") -> None:
        config = CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97}
        (folder / "config.json").write_text(json.dumps(config))
        self.options = ServerOptions(
            model_path=str(folder),
            load_format="dummy",
            dtype="float32",
            max_total_tokens=512,
            max_running_requests=2,
            device="cpu",
            attention_backend=backend,
        )
        model = load_model(self.options)
        self.folder = folder / "profiles"
        self.queue = StepQueue(steps := StepRunner(model, 2), NoPageMover(), 0)
        self.rank = RankProfiler(self.folder, 0, model.device.kind, steps)
        self.profiler = Profiler(self.rank, self.queue, NoOtherRanks())

    def step(self, id_: int, tokens: list[int]) -> bytes:
        """Compute a prompt in row 0, and return the token that is sampled."""
        row = RowInit(0, len(tokens), SamplingParams(seed=0, temperature=0.0))
        one, zero, count = pack_i32([1]), pack_i32([0]), len(tokens)
        ids, slots = pack_i32(tokens), pack_i32(range(16, 16 + count))
        self.queue.launch(ForwardStep(id_, zero, zero, pack_i32([count]), zero, one, ids, slots, [row]))
        return self.queue.collect().next_tokens

    def start(self, name: str, **changes: Any) -> ProfileStarted:
        """Have a profile started."""
        started = self.profiler.obey(msgspec.structs.replace(StartProfile(name, [], False, False), **changes))
        assert isinstance(started, ProfileStarted)
        return started

    def stop(self) -> ProfileWritten:
        """Have it ended."""
        written = self.profiler.obey(StopProfile())
        assert isinstance(written, ProfileWritten)
        return written


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_trace_holds_the_steps_between_start_and_stop(tmp_path: Path, backend: str) -> None:
    worker = Worker(tmp_path, backend)
    before = worker.step(1, [5, 6, 7])
    started = worker.start("a", record_shapes=True)
    assert (started.error, started.folder, started.activities) == ("", str(worker.folder / "a"), ["CPU"])
    assert worker.step(2, [5, 6, 7]) == before
    worker.step(3, [5, 6])
    written = worker.stop()
    worker.step(4, [5, 6, 7])
    assert (written.error, written.files) == ("", started.files)
    [path] = map(Path, written.files)
    assert written.nbytes == path.stat().st_size
    assert [file.name for file in path.parent.iterdir()] == ["rank-0.trace.json.gz"]
    assert [folder.stat().st_mode & 0o777 for folder in (worker.folder, path.parent)] == [0o700, 0o700]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert [name for name in names if name.startswith("step ")] == [
        "step 2: 1 entries, 3 tokens",
        "step 3: 1 entries, 2 tokens",
    ]
    assert names.count("collect") == 2
    if backend == "torch":
        assert any(name.startswith("aten::") for name in names)
        assert any("Input Dims" in event.get("args", {}) for event in events)


@pytest.mark.usefixtures("one_thread")
def test_what_can_not_be_recorded_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path)
    refused = worker.start("gpu", activities=["GPU"])
    assert (refused.status, worker.folder.exists()) == (400, False)
    assert "CPU" in refused.error
    assert "not" not in worker.start("both", activities=["CPU", "GPU"]).error
    assert worker.stop().error == ""
    again = worker.start("both")
    assert (again.status, '"both"' in again.error) == (409, True)
    monkeypatch.setattr(profiler_module, "MAX_TRACE_BYTES", 10)
    worker.start("large")
    written = worker.stop()
    assert (written.files, "num_steps" in written.error) == ([], True)
    assert list((worker.folder / "large").iterdir()) == []
    assert "records no profile" in worker.stop().error
    monkeypatch.setattr(profiler_module, "MAX_PROFILES", 2)
    full = worker.start("third")
    assert (full.status, "remove some" in full.error) == (409, True)
    # After all of that it still computes.
    assert len(worker.step(1, [5, 6, 7])) == 4


@pytest.mark.parametrize("stack", [pytest.param("False", marks=pytest.mark.slow), "True"])
def test_a_process_that_ends_while_it_records_ends_by_its_own_reason(tmp_path: Path, stack: str) -> None:
    code = f"""if True:
        import pathlib, sys, torch
        from pdserve.messages.profiling import StartProfile
        from pdserve.model_runner.profiler import RankProfiler
        rank = RankProfiler(pathlib.Path({str(tmp_path)!r}), 0, "cpu", None)
        rank.start(StartProfile("a", ["CPU"], {stack}, False))
        torch.ones(3).sum()
        sys.exit(7)
    """
    done = subprocess.run(python_command("-c", code), capture_output=True, timeout=limit(60), check=False)
    assert done.returncode == 7, done.stderr


def test_a_folder_where_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    rank = RankProfiler(folder, 0, "cpu", None)  # type: ignore[arg-type]
    started = Profiler(rank, None, NoOtherRanks()).obey(StartProfile("a", [], False, False))  # type: ignore[arg-type]
    assert isinstance(started, ProfileStarted)
    assert (started.status, os.listdir(folder)) == (503, [])
    assert "chmod go-w" in started.error


def test_traces_are_in_the_run_directory_unless_an_option_says_otherwise(tmp_path: Path) -> None:
    assert profile_folder(ServerOptions(), tmp_path) == tmp_path / "profiles"
    assert profile_folder(ServerOptions(profile_dir="/a/b"), tmp_path) == Path("/a/b")


# --- HTTP ---


def test_http_asks_and_answers() -> None:
    async def run(engine: FakeEngine) -> None:
        async def ask(path: str, body: Any, result: ProfileResult | RefusedAnswer) -> tuple[Any, Any]:
            answer = asyncio.create_task(engine.post(path, body))
            await engine.wait_for(lambda: bool(engine.questions))
            question: Any = engine.questions.pop()
            engine.client.dispatch([msgspec.structs.replace(result, id=question.id)])
            response = await answer
            assert response.status_code == (result.status if isinstance(result, RefusedAnswer) else 200), response.text
            return msgspec.structs.replace(question, id=0), response.json()

        good = ProfileResult("/f/a", ["/f/a/x"], ["CPU"], 5, 60.0, 9, "request")
        body = {"output_dir": "a", "num_steps": 5, "activities": ["CPU"], "record_shapes": True, "start_step": None}
        asked, response = await ask("/start_profile", body, good)
        assert asked == StartProfileReq("a", 5, ["CPU"], record_shapes=True)
        assert StartAnswer.model_validate(response).files == ["/f/a/x"]
        # As SGLang's tools spell it out.
        asked, _ = await ask("/start_profile", {"profile_by_stage": False, "merge_profiles": False}, good)
        assert (asked.num_steps, asked.activities, asked.with_stack) == (MAX_STEPS, [], False)
        other, _ = await ask("/start_profile", {"with_stack": True}, good)
        assert other.num_steps == MAX_STACK_STEPS
        assert other.name != asked.name
        asked, response = await ask("/stop_profile", {}, good)
        assert (asked, StopAnswer.model_validate(response).bytes) == (StopProfileReq(), 9)
        _, response = await ask("/start_profile", {}, RefusedAnswer(409, "a profile is recording"))
        assert response["error"]["message"] == "a profile is recording"

    with_engine(run, mute=True)


@pytest.mark.parametrize("path", ["start", "stop"])
def test_no_body_is_needed(path: str) -> None:
    async def run(engine: FakeEngine) -> None:
        async with engine.http() as client:
            answer = asyncio.create_task(client.post(f"/{path}_profile"))
            await engine.wait_for(lambda: bool(engine.questions))
            question: Any = engine.questions[0]
            engine.client.dispatch([ProfileResult("", [], [], 0, 0.0, ended_by="request", id=question.id)])
            assert (await answer).status_code == 200

    with_engine(run, mute=True)


BAD_NAMES = ["", ".", "..", "/tmp/x", "../x", "a/b", "a\0", "-a", ".hidden", "a b", "a\n", "ä", "a" * 65, "~"]
BAD: list[tuple[dict[str, Any], str]] = [
    *(({"output_dir": name}, "output_dir") for name in BAD_NAMES),
    ({"num_steps": 0}, "num_steps"),
    ({"num_steps": MAX_STEPS + 1}, "num_steps"),
    ({"with_stack": True, "num_steps": MAX_STACK_STEPS + 1}, "num_steps"),
    ({"activities": ["RPD"]}, "activities[0]"),
    ({"profile_by_stage": True}, "profile_by_stage"),
    ({"start_step": 3}, "start_step"),
]


@pytest.mark.parametrize(("body", "field"), BAD, ids=lambda value: repr(value)[:40])
def test_what_asks_for_too_much_or_names_a_path_is_refused(body: dict[str, Any], field: str) -> None:
    async def run(engine: FakeEngine) -> None:
        answer = await engine.post("/start_profile", body)
        assert (answer.status_code, answer.json()["error"]["param"], engine.questions) == (400, field, [])

    with_engine(run)
