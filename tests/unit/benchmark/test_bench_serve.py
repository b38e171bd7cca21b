"""The command ``pdserve bench serve`` against a scripted server: exit codes, table, JSON, plots."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pdserve.runtime.exit_codes import EXIT_USAGE
from pdserve.server.cli import app

EVENT = 'data: {"meta_info": {"prompt_tokens": 8, "completion_tokens": %d, "finish_reason": %s}}\n\n'
STREAM = "".join(EVENT % (n, '{"type": "length"}' if n == 3 else "null") for n in (1, 2, 3)) + "data: [DONE]\n\n"


class TinyServer:
    """Answers every POST with three tokens; every ``fails_every``-th (0: none) with a 500."""

    def __init__(self, fails_every: int) -> None:
        self.paths: list[str] = []
        self.keys: set[str | None] = set()
        lock = threading.Lock()
        tiny = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                with lock:
                    tiny.paths.append(self.path)
                    tiny.keys.add(self.headers["authorization"])
                    fails = fails_every and len(tiny.paths) % fails_every == 0
                body = b"[oh] no" if fails else STREAM.encode()
                self.send_response(500 if fails else 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port

    def __enter__(self) -> TinyServer:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


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


def test_the_key_can_stand_in_a_file(server: TinyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("# users\nfirst-user a-key\nother another-key\n")
    assert bench(server, "--api-key-file", str(tmp_path / "keys")) == 0
    assert server.keys == {"Bearer a-key"}
    assert bench(server, "--api-key-file", str(tmp_path / "keys"), "--api-key", "x") == EXIT_USAGE
    assert bench(server, "--api-key-file", str(tmp_path / "none")) == EXIT_USAGE
    assert "drop --api-key" in (said := capsys.readouterr().err)
    assert "none can't be read" in said


def test_the_key_can_come_through_a_pipe(server: TinyServer) -> None:
    """As of ``--api-key-file <(…)``. It can be read once."""
    reader, writer = os.pipe()
    os.write(writer, b"a-key\n")
    os.close(writer)
    try:
        assert bench(server, "--api-key-file", f"/dev/fd/{reader}") == 0
    finally:
        os.close(reader)
    assert server.keys == {"Bearer a-key"}


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


def test_what_cannot_be_measured_is_reported(
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
