"""The comparison with other engines: figures, page, processes, the proxy. No engine is installed for this."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tools.peers.__main__ import app
from tools.peers.cases import CASES, EIGHT, PREFILL, Case
from tools.peers.charts import draw_charts
from tools.peers.compare import Comparison, result_path
from tools.peers.engines import ENGINES, Engine, Launch
from tools.peers.errors import PeerDied, ResultsError
from tools.peers.layout import PeerSetup
from tools.peers.machine import Machine, this_machine
from tools.peers.page import write_index, write_machine_page
from tools.peers.processes import running
from tools.peers.results import Results, claim
from tools.peers.vllm_proxy import make_proxy

SETUP = PeerSetup(Path("/b"), (0, 1))
MACHINE = Machine("Some CPU @ 2.50GHz", 2, "avx2", "avx2")
OTHER = Machine("Another CPU", 2, "avx2, avx512f", "avx512")


def dist(value: float) -> dict:
    return {"count": 9, "mean": value, "median": value, "p90": value, "p99": value, "max": value}


def run_of(rate: float, latency: float) -> dict:
    figures = {"output_throughput": rate, "input_throughput": rate, "goodput": rate, "failed": latency}
    figures |= {name: dist(latency) for name in ("ttft", "itl", "tpot", "e2e")}
    groups = [{"name": name, **figures} for name in ("short", "long")]
    chunks = {"chunk_times": [0.1, 0.1 + latency / 1e3, 0.2 + latency / 500], "chunk_tokens": [1, 1, 1]}
    requests = [{"group": name, "error": None, "ttft": latency, **chunks} for name in ("short", "long")]
    return {"report": {"total": {"name": "all", **figures}, "groups": groups}, "requests": requests}


def results(**runs: Sequence[tuple[float, float]]) -> Results:
    """Make results with the same runs for all cases: by engine (with _ for -), rate and latency of each round."""
    return Results(
        {
            (case, engine.replace("_", "-"), number): run_of(*figures)
            for case in CASES
            for engine, rounds in runs.items()
            for number, figures in enumerate(rounds)
        },
        MACHINE,
    )


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    # Rates 10/5, 8/8, 6/1: ratios 2, 1, 6. The medians alone would give 8/5, the mean 3.
    got = results(pdserve=[(10, 5), (8, 5), (6, 5)], vllm=[(5, 10), (8, 20), (1, 30)])
    rate, latency = EIGHT.metrics[:2]
    assert got.ratio(EIGHT, "pdserve", "vllm", rate) == 2
    assert got.median(EIGHT, "pdserve", rate) == 8
    # Of times, less is better.
    assert got.ratio(EIGHT, "pdserve", "vllm", latency) == 4
    assert got.ratio(EIGHT, "pdserve", "llamacpp", latency) is None
    assert got.typical_round(EIGHT, "vllm") == run_of(5, 10)


def test_only_rounds_that_both_have_are_compared() -> None:
    got = results(pdserve=[(10, 1), (40, 1)], vllm=[(5, 1)])
    assert got.ratio(PREFILL, "pdserve", "vllm", PREFILL.metrics[0]) == 2


def test_every_metric_finds_its_figure_in_a_report() -> None:
    report = run_of(7, 3)["report"]
    for case in CASES.values():
        assert [metric.read(report) for metric in case.metrics] == [7 if m.is_rate else 3 for m in case.metrics]
    assert CASES["prefill"].metrics[1].read({"total": {"ttft": None}}) is None


def test_the_page_shows_all_and_survives_what_is_missing(tmp_path: Path) -> None:
    both = {"pdserve": [(1234, 5)], "vllm": [(617, 10)], "pdserve_pd": [(50, 2)]}
    got = results(**both)
    images = draw_charts(tmp_path / MACHINE.slug, got)
    page = write_machine_page(tmp_path, got, images, 2)
    text = page.read_text()
    missing = " – | – | – |"
    row = f"| 512/1, 16 requests, one at a time | input tok/s | 1,234 | 617 | **2.00** |{missing * 2}"
    assert row in text
    assert "| P99 ITL of the streams, ms | 2.00 | 5.00 | 10.0 | – | **2.50** | **5.00** | – |" in text
    assert [image.name for image in images] == ["ratios.png", "mixed_latency.png", "mixed_throughput.png"]
    assert "(some-cpu-2-50ghz-2-cores-avx2/ratios.png)" in text
    assert "$" not in text
    write_machine_page(tmp_path, Results({}, MACHINE), draw_charts(tmp_path / "none", Results({}, MACHINE)), 2)


def test_a_run_leaves_other_machines_pages_alone_and_lists_them(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    first = write_machine_page(folder, results(pdserve=[(1234, 5)]), [], 2)
    kept = first.read_text()
    second = write_machine_page(folder, Results({}, OTHER), [], 2)
    write_index(tmp_path / "benchmarks.md")
    assert first.read_text() == kept
    index = (tmp_path / "benchmarks.md").read_text()
    for page, machine in ((first, MACHINE), (second, OTHER)):
        assert f"- [{machine.line}](benchmarks/{page.name})" in index
    assert "$" not in index


def test_results_are_of_one_machine(tmp_path: Path) -> None:
    claim(tmp_path, MACHINE)
    claim(tmp_path, MACHINE)
    assert Results.read(tmp_path).machine == MACHINE
    with pytest.raises(ResultsError, match=r"Some CPU.*level avx2; this is Another CPU"):
        claim(tmp_path, OTHER)
    with pytest.raises(ResultsError, match="holds no results"):
        Results.read(tmp_path / "none")
    assert this_machine() == this_machine()


def test_what_is_started() -> None:
    launches = ENGINES["vllm-pd"].launches(SETUP, [1, 2, 3, 4, 5])
    assert [launch.name for launch in launches] == ["vllm-pd-prefill", "vllm-pd-decode", "vllm-pd-proxy"]
    prefill, decode, proxy = launches
    assert (prefill.env["VLLM_CPU_OMP_THREADS_BIND"], decode.env["VLLM_CPU_OMP_THREADS_BIND"]) == ("0", "1")
    ports = [prefill.health, decode.health, prefill.env["VLLM_NIXL_SIDE_CHANNEL_PORT"], proxy.argv[-3]]
    assert ports == ["http://127.0.0.1:2/health", "http://127.0.0.1:4/health", "3", "1"]
    assert proxy.argv[-2:] == ("http://127.0.0.1:2", "http://127.0.0.1:4")
    for name, engine in ENGINES.items():
        assert name == engine.name
        first = engine.launches(SETUP, list(range(1, engine.num_ports + 1)))
        assert len(first) == (3 if name == "vllm-pd" else 1)


SERVER = """
import sys, http.server
EVENT = 'data: {"meta_info": {"prompt_tokens": 8, "completion_tokens": 2, "finish_reason": {"type": "length"}}}\\n\\n'
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(b"")
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer((EVENT + "data: [DONE]\\n\\n").encode())
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Fake(Engine):
    """A server that answers at once, or ends at once."""

    name = "fake"
    title = "Fake"
    backend = "pdserve"
    cases = ("tiny",)

    def __init__(self, program: str = SERVER) -> None:
        self.program = program

    def launches(self, setup: PeerSetup, ports: Sequence[int]) -> list[Launch]:
        argv = (sys.executable, "-c", self.program, str(ports[0]))
        return [Launch("fake", argv, f"http://127.0.0.1:{ports[0]}/health")]


TINY = Case("tiny", "tiny", ("--input-len", "8", "--output-len", "2", "--num-prompts", "3"), PREFILL.metrics)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The only engine, with a case of its own."""
    engine = Fake()
    monkeypatch.setitem(ENGINES, "fake", engine)
    monkeypatch.setitem(CASES, "tiny", TINY)
    return engine


def test_rounds_are_run_resumed_and_read(fake: Fake, tmp_path: Path) -> None:
    said: list[str] = []
    claim(tmp_path, MACHINE)
    comparison = Comparison(SETUP, tmp_path, said.append, patience=0)
    assert comparison.run(1, ["fake"], ["tiny", "mixed"]) == []
    first = result_path(tmp_path, 0, "fake", "tiny").read_bytes()
    assert Results.read(tmp_path).values(TINY, "fake", TINY.metrics[0])[0] > 0
    assert comparison.run(2, ["fake"], ["tiny"]) == []
    assert result_path(tmp_path, 0, "fake", "tiny").read_bytes() == first
    assert sorted(Results.read(tmp_path).rounds("tiny", "fake")) == [0, 1]
    assert not list(tmp_path.glob("*.part"))


def test_an_engine_that_fails_is_reported_and_left_out(fake: Fake, tmp_path: Path) -> None:
    claim(tmp_path, MACHINE)
    fake.program = "print('no such model'); raise SystemExit(3)"
    (failure,) = Comparison(SETUP, tmp_path, lambda _: None, patience=0).run(1, ["fake"], ["tiny"])
    assert "fake ended with 3:\nno such model" in failure
    fake.program = SERVER.replace('"length"', '"abort"')
    (failure,) = Comparison(SETUP, tmp_path, lambda _: None, patience=0).run(1, ["fake"], ["tiny"])
    assert "ended by abort" in failure
    assert Results.read(tmp_path).runs == {}


def test_a_server_is_ended_with_its_children(tmp_path: Path) -> None:
    """Even one that has children of its own and leaves SIGTERM to them."""
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SERVER!r}, sys.argv[1]])"
    with running(Fake(child), SETUP, tmp_path) as url:
        assert httpx.get(url + "/health", trust_env=False).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(url + "/health", trust_env=False)
    with pytest.raises(PeerDied, match="ended with"), running(Fake("1/0"), SETUP, tmp_path):
        pass


def test_the_proxy_hands_the_prefills_answer_to_the_decode() -> None:
    bodies: dict[str, dict] = {}

    async def answer(request: httpx.Request) -> httpx.Response:
        bodies[request.url.host] = json.loads(request.content)
        if request.url.host == "p":
            status = 200 if bodies["p"]["prompt"] else 400
            return httpx.Response(status, json={"kv_transfer_params": {"remote_host": "here"}})
        stream = httpx.ByteStream(b"data: [DONE]\n\n")
        return httpx.Response(200, stream=stream, headers={"content-type": "text/event-stream"})

    async def ask(prompt: list[int]) -> httpx.Response:
        proxy = make_proxy("http://p", "http://d", httpx.MockTransport(answer))
        async with proxy.router.lifespan_context(proxy):
            transport = httpx.ASGITransport(proxy)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                body = {"prompt": prompt, "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
                return await client.post("/v1/completions", json=body)

    answered = asyncio.run(ask([1, 2]))
    assert (answered.status_code, answered.content) == (200, b"data: [DONE]\n\n")
    assert (bodies["p"]["max_tokens"], bodies["p"]["stream"], "stream_options" in bodies["p"]) == (1, False, False)
    assert bodies["p"]["kv_transfer_params"]["do_remote_decode"] is True
    assert (bodies["d"]["max_tokens"], bodies["d"]["kv_transfer_params"]) == (9, {"remote_host": "here"})
    assert asyncio.run(ask([])).status_code == 400


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["--engines", "triton"], result_action="return_value") == 2
    assert "there is no 'triton'" in capsys.readouterr().err
