"""The command ``pdserve bench serve`` against a scripted server: exit codes, table, JSON, plots."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.server.cli import app

EVENT = 'data: {"meta_info": {"prompt_tokens": 8, "completion_tokens": %d, "finish_reason": %s}}\n\n'
STREAM = "".join(EVENT % (n, '{"type": "length"}' if n == 3 else "null") for n in (1, 2, 3)) + "data: [DONE]\n\n"


class TinyServer(threading.Thread):
    """Answers every POST with three tokens; every ``fails_every``-th with a 500."""

    def __init__(self, fails_every: int) -> None:
        super().__init__(daemon=True)
        self.fails_every = fails_every
        self.paths: list[str] = []
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._ended.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.wait([task])

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                self.paths.append(head.split(b" ")[1].decode())
                fails = self.fails_every and len(self.paths) % self.fails_every == 0
                status, body = (500, b"[oh] no") if fails else (200, STREAM.encode())
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    def __enter__(self) -> TinyServer:
        self.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self.join(10)


@pytest.fixture
def server() -> Iterator[TinyServer]:
    with TinyServer(fails_every=0) as running:
        yield running


def bench(server: TinyServer, *argv: str) -> int:
    shape = ["--input-len", "8", "--output-len", "3", "--num-prompts", "6"]
    url = f"http://127.0.0.1:{server.port}"
    return app(["bench", "serve", "--base-url", url, *shape, *argv], result_action="return_value")


def test_a_run_leaves_a_table_a_file_and_plots(
    server: TinyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "--output-json",
        str(tmp_path / "out/r.json"),
        "--output-details",
        "--api-key",
        "secret",
        "--slo-ttft-ms",
        "9e5",
    ]
    assert bench(server, *argv, "--max-concurrency", "2", "4", "--plot", str(tmp_path / "png"), "--flush-cache") == 0
    shown = capsys.readouterr().out
    assert "concurrency 2" in shown
    assert "TTFT" in shown
    content = json.loads((tmp_path / "out/r.json").read_text())
    assert "secret" not in json.dumps(content)
    assert [run["report"]["concurrency"] for run in content["runs"]] == [2, 4]
    total = content["runs"][0]["report"]["total"]
    assert (total["completed"], total["output_tokens"], total["input_tokens"], total["slo_share"]) == (6, 18, 48, 1.0)
    request = content["runs"][1]["requests"][5]
    assert (request["completion_tokens"], request["chunk_tokens"], request["error"]) == (3, [1, 1, 1], None)
    # For each load a warm-up request, a flush and the six.
    assert server.paths.count("/flush_cache") == 2
    assert server.paths.count("/generate") == 14
    assert sorted(p.name for p in (tmp_path / "png").iterdir()) == ["latency.png", "throughput.png", "ttft_load.png"]


def test_a_single_load_is_plotted_too(server: TinyServer, tmp_path: Path) -> None:
    assert bench(server, "--plot", str(tmp_path)) == 0
    assert (tmp_path / "ttft_load.png").read_bytes().startswith(b"\x89PNG")


def test_exit_codes_tell_of_failures(capsys: pytest.CaptureFixture[str]) -> None:
    with TinyServer(fails_every=3) as some:
        assert bench(some, "--warmup-requests", "0") == 0
        assert "2 failed: HTTP 500: [oh] no" in capsys.readouterr().out
    with TinyServer(fails_every=3) as some:
        assert bench(some, "--strict", "--warmup-requests", "0") == 1
    with TinyServer(fails_every=1) as all_of_them:
        assert bench(all_of_them, "--warmup-requests", "0") == 1
        assert bench(all_of_them) == 1
        assert "a warm-up request failed: HTTP 500" in capsys.readouterr().err


def test_what_cannot_be_measured_is_told(
    server: TinyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench(server, "--scenario", "nowhere") == 1
    assert "neither a file nor one of mixed" in capsys.readouterr().err
    assert bench(server, "--extra-body", "[]") == 1
    assert bench(server, "--request-rate", "0") == 2
    assert "pdserve bench serve: --request-rate" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench(server, "--plot", str(tmp_path)) == 1
    assert "pip install 'pdserve[bench]'" in capsys.readouterr().err
    assert server.paths == []
