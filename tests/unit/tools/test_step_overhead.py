"""What all but the model costs: the fake worker, the clients that throw answers away, the books, and all of it."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.machine import limit

from pdserve.benchmark.errors import BenchOptionsError, ServerError
from pdserve.messages.base import pack_i32, unpack_i32
from pdserve.messages.worker import ForwardStep
from pdserve.server.options import ServerOptions
from tools.environment import environment
from tools.servers.process_cpu import cpu_seconds, find_children
from tools.servers.raw_streams import RawStreams, StreamCost, request_bytes
from tools.step_overhead.__main__ import OverheadOptions, make_requests, summarize
from tools.step_overhead.fake_worker import GATHER_SECONDS, TOKEN_IDS, FakeModel, StepRecord, ready_message

CLIENT = StreamCost(seconds=2.0, cpu_seconds=0.5, reads=10, bytes=100)


def make_step(q_lens: list[int], sample: list[int]) -> ForwardStep:
    """Make a step. Fields that the fake does not look at mean nothing."""
    rows, ids = pack_i32(range(len(q_lens))), pack_i32([0] * sum(q_lens))
    return ForwardStep(7, rows, rows, pack_i32(q_lens), rows, pack_i32(sample), ids, ids)


def record_of(model: FakeModel) -> tuple[list[float], list[float], int]:
    record = model.record()
    return np.frombuffer(record.starts).tolist(), np.frombuffer(record.busy).tolist(), record.sampled


def test_a_step_of_the_batch_takes_the_cpu_time_that_it_is_told_to() -> None:
    model = FakeModel()
    model.occupy(3, 0.01)
    begin = time.perf_counter()
    result = model.run(make_step([1, 1, 1], [1, 1, 1]))
    assert time.perf_counter() - begin >= 0.01
    assert result.step_id == 7
    ids = unpack_i32(result.next_tokens)
    assert len(ids) == 3
    assert ((ids >= TOKEN_IDS[0]) & (ids < TOKEN_IDS[1])).all()
    [started], [busy], sampled = record_of(model)
    assert started >= begin
    assert 0.01 <= busy < 0.1
    assert sampled == 3
    model.occupy(3, 0.0)
    assert record_of(model) == ([], [], 0)


@pytest.mark.parametrize(("q_lens", "sample"), [([1, 1], [1, 1]), ([1, 1, 16], [1, 1, 0]), ([1] * 4, [1] * 4)])
def test_other_steps_wait_for_requests_to_gather_and_do_not_count(q_lens: list[int], sample: list[int]) -> None:
    model = FakeModel()
    model.occupy(3, 0.0)
    begin = time.perf_counter()
    assert len(unpack_i32(model.run(make_step(q_lens, sample)).next_tokens)) == sum(sample)
    assert time.perf_counter() - begin >= GATHER_SECONDS
    assert record_of(model)[1:] == ([0.0], sum(sample))


def test_the_fake_says_of_itself_what_the_real_worker_says_of_the_model() -> None:
    ready = ready_message(ServerOptions(page_size=32, context_length=1000))
    assert (ready.vocab_size, ready.context_length) == (49152, 1000)
    assert ready.layout.page_size == 32
    assert ready.max_total_tokens % 32 == 0


def record(starts: list[float], busy: list[float], sampled: int) -> StepRecord:
    return StepRecord(np.array(starts).tobytes(), np.array(busy).tobytes(), sampled)


def test_only_whole_steps_followed_by_whole_steps_count() -> None:
    #            a prompt | whole  whole  whole | fewer | whole
    starts, busy = [0.0, 1.0, 1.5, 2.5, 9.0, 20.0], [0.0, 0.1, 0.2, 0.1, 0.0, 0.1]
    cpu = {"worker": 1.5, "http": 2.0}
    overhead = summarize(record(starts, busy, 40), 4, 100.0, cpu, CLIENT)
    assert overhead is not None
    assert overhead.steps == 2
    assert overhead.period.mean == pytest.approx((0.5 + 1.0) / 2)
    assert overhead.added.mean == pytest.approx((0.4 + 0.8) / 2)
    assert overhead.added.p50 == pytest.approx(0.6)
    # 40 tokens are 10 steps of 4.
    assert overhead.cpu == {"worker": pytest.approx(0.1), "http": pytest.approx(0.2), "client": pytest.approx(0.05)}
    assert summarize(record([0.0, 1.0], [0.0, 0.1], 4), 4, 0.0, cpu, CLIENT) is None


@pytest.mark.parametrize(
    "wrong", [{"batch": []}, {"batch": [0]}, {"tokens": 1}, {"stream_interval": 0}, {"step_ms": [-1.0]}]
)
def test_options_that_measure_nothing_are_refused(wrong: dict) -> None:
    OverheadOptions().check()
    with pytest.raises(BenchOptionsError):
        OverheadOptions(**wrong).check()


def test_prompts_differ_and_a_batch_is_one_request() -> None:
    separate = list(itertools.islice(make_requests(OverheadOptions(), 4, 9, 0), 3))
    assert len(set(separate)) == 3
    [batched] = itertools.islice(make_requests(OverheadOptions(transport="batched"), 4, 9, 0), 1)
    assert batched.count(b"],[") == 3
    [chunks] = itertools.islice(make_requests(OverheadOptions(endpoint="completions"), 4, 9, 0), 1)
    assert chunks.startswith(b"POST /v1/completions ")


# --- the clients ---


@contextmanager
def server(*pieces: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Answers each connection with ``pieces``, one by one, and closes it. Yields the port, and the requests so far."""
    requests: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection:
                requests.append(connection.recv(65536))
                for piece in pieces:
                    connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1], requests
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
REQUEST = request_bytes("/generate", {"a": 1})


def test_clients_read_whole_streams_and_ask_anew_until_the_time_is_up() -> None:
    pieces = (HEAD, b"data: {}\n\n", b"data: [DO", b"NE]\n\n")
    with server(*pieces) as (port, requests):
        cost = RawStreams(port, itertools.repeat(REQUEST), 5).run(0.0)
        assert requests == [REQUEST] * 5
        assert cost.bytes == 5 * sum(map(len, pieces))
        assert cost.reads >= 10
        RawStreams(port, itertools.repeat(REQUEST), 2).run(0.2)
        assert len(requests) > 7
    assert REQUEST.endswith(b'connection: close\r\ncontent-length: 7\r\n\r\n{"a":1}')


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [((HEAD, b"data: {}\n\n"), "broke off"), ((b"HTTP/1.1 503 \r\n",), "refused: HTTP/1.1 503")],
)
def test_an_answer_that_is_no_whole_stream_ends_the_measurement(pieces: tuple[bytes, ...], complaint: str) -> None:
    with server(*pieces) as (port, _), pytest.raises(ServerError, match=complaint):
        RawStreams(port, itertools.repeat(REQUEST), 1).run(0.0)


# --- all of it ---


def test_cpu_time_of_a_child_is_found_under_its_command_line() -> None:
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        titles = {pid: title for title, pid in find_children(os.getpid()).items()}
        assert titles[child.pid].startswith(sys.executable)
        assert 0.15 <= cpu_seconds(child.pid) < 5
        child.communicate(b"\n")


@pytest.mark.slow
def test_a_whole_measurement() -> None:
    argv = [sys.executable, "-P", "-m", "tools.step_overhead"]
    argv += ["--batch", "2", "--step-ms", "1", "--seconds", "0", "--tokens", "20"]
    out = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=limit(90), env=environment())
    assert (out.returncode, out.stderr) == (0, "")
    period, cpu = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.stdout.splitlines() if "│" in line]
    batch, step_ms, steps, mean, added, *_ = period
    assert (batch, step_ms) == ("2", "1")
    assert 10 <= int(steps) < 20  # the two may begin a few steps apart
    assert float(mean) == pytest.approx(1.0 + float(added), abs=0.3)
    assert len(cpu) == 9


def test_the_fake_worker_imports_no_torch() -> None:
    code = "import sys, tools.step_overhead.fake_worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, env=environment()).returncode == 0
