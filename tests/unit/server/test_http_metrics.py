"""An instance's ``/metrics``: what clients got is what is counted, once, while it comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_engine import PROMPT_TOKENS, FakeEngine, events, with_engine
from support.scrape import Page, scheduler_metrics

from pdserve.messages.outputs import FinishType, ReqError, ReqText, TextBatch
from pdserve.server.http.metrics.metric_aliases import Growth

VLLM_DASHBOARD = """
vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
vllm:prompt_tokens_total vllm:generation_tokens_total vllm:inter_token_latency_seconds_bucket
vllm:inter_token_latency_seconds_sum vllm:inter_token_latency_seconds_count vllm:num_requests_running
vllm:num_requests_waiting vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
vllm:time_to_first_token_seconds_count vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket
vllm:request_generation_tokens_bucket vllm:request_success_total vllm:request_queue_time_seconds_sum
vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum vllm:request_max_num_generation_tokens_sum
"""
SGLANG_DASHBOARD = """
sglang:e2e_request_latency_seconds_bucket sglang:e2e_request_latency_seconds_sum
sglang:e2e_request_latency_seconds_count sglang:time_to_first_token_seconds_bucket
sglang:time_to_first_token_seconds_sum sglang:time_to_first_token_seconds_count sglang:num_running_reqs
sglang:gen_throughput sglang:cache_hit_rate sglang:num_queue_reqs
"""
"""What the two projects' own Grafana dashboards ask for."""
TOKENS = {"sampling_params": {"max_new_tokens": 5}}


async def scrape(engine: FakeEngine) -> Page:
    answer = await engine.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Page(answer.text)


def finished(page: Page) -> dict[str, float]:
    """Return the number of ended requests by reason, without zeros."""
    name = "pdserve_requests_finished_total"
    return {s.labels["reason"]: s.value for s in page.samples if s.name == name and s.value}


def test_counts_are_what_clients_were_told() -> None:
    async def run(engine: FakeEngine) -> None:
        streamed = events(await engine.post("/generate", {"text": "a", "stream": True, **TOKENS}))
        whole = (await engine.post("/generate", {"text": ["a", "b"], **TOKENS})).json()
        chat = {"messages": [{"role": "user", "content": "a"}], "n": 3, "max_tokens": 2}
        usage = (await engine.post("/v1/chat/completions", chat)).json()["usage"]
        counts = [answer["meta_info"]["completion_tokens"] for answer in (streamed[-1], *whole)]
        page = await scrape(engine)
        assert page.total("pdserve_generation_tokens_total") == sum(counts) + usage["completion_tokens"] == 21
        assert finished(page) == {"length": 6}
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_seconds"):
            assert page.total(f"pdserve_{name}_count") == 6
        assert page.total("pdserve_request_prompt_tokens_sum") == 6 * PROMPT_TOKENS
        assert page.total("pdserve_request_generation_tokens_sum") == 21
        # Between the tokens of a stream; the tokens of other requests came at once.
        assert page.total("pdserve_inter_token_latency_seconds_count") == 4
        assert page.total("pdserve_request_transfer_seconds_count") == 0
        assert page.total("pdserve_http_responses_total", path="/generate", status="200") == 2
        assert {s.labels["role"] for s in page.samples if s.name.startswith("pdserve_")} == {"unified"}

    with_engine(run)


def test_tokens_count_as_they_come_and_gaps_are_what_a_reader_waits() -> None:
    async def run(engine: FakeEngine) -> None:
        asked = asyncio.create_task(engine.post("/generate", {"text": "a", "stream": True}))
        await engine.wait_for(lambda: len(engine.requests) == 1)
        [request], metrics = engine.requests, engine.client.metrics
        choice = engine.client.live.get(request.rid).choice  # type: ignore[union-attr]

        def say(count: int, at: float, finish: FinishType | None = None) -> None:
            item = engine.text(request, "x", list(range(count)), finish)
            metrics.on_text(choice, item, choice.arrival + at)
            choice.add(item, choice.arrival + at)

        say(1, 0.07)
        assert (await scrape(engine)).total("pdserve_generation_tokens_total") == 1
        say(4, 0.27)  # four at once, 0.2 s after the first: a reader's mean gap is 0.05
        say(0, 0.27, FinishType.STOP)
        page = await scrape(engine)
        assert page.total("pdserve_generation_tokens_total") == 5
        assert page.total("pdserve_time_to_first_token_seconds_sum") == pytest.approx(0.07)
        assert page.total("pdserve_inter_token_latency_seconds_count") == 4
        assert page.total("pdserve_inter_token_latency_seconds_sum") == pytest.approx(0.2)
        assert page.total("pdserve_inter_token_latency_seconds_bucket", le="0.06") == 4
        assert page.total("pdserve_inter_token_latency_seconds_bucket", le="0.04") == 0
        engine.client.dispatch([TextBatch([engine.text(request, "", [], FinishType.STOP)])])
        await asked

    with_engine(run, hold=True)


def test_errors_aborts_and_clients_that_leave_are_no_latencies() -> None:
    async def run(engine: FakeEngine) -> None:
        engine.errors = [ReqError("", 503, "full", "overloaded_error")]
        assert (await engine.post("/generate", {"text": "a"})).status_code == 503
        assert (await engine.post("/generate", {"txt": "a"})).status_code == 400
        engine.hold = True
        asked = asyncio.create_task(engine.post("/generate", {"text": "a", "rid": "r"}))
        await engine.wait_for(lambda: len(engine.requests) == 2)
        await engine.post("/abort_request", {"rid": "r"})
        assert (await asked).json()["meta_info"]["finish_reason"]["type"] == "abort"
        page = await scrape(engine)
        assert finished(page) == {"error": 1, "abort": 1}
        assert page.total("pdserve_request_errors_total", type="overloaded_error") == 1
        assert page.total("pdserve_request_errors_total") == 1
        assert page.total("pdserve_http_responses_total", status="400") == 1
        assert page.total("pdserve_e2e_request_latency_seconds_count") == 0

    with_engine(run)


def test_a_prefill_leg_is_no_request_of_a_client() -> None:
    async def run(engine: FakeEngine) -> None:
        leg = {"bootstrap_host": "h", "bootstrap_room": 4}
        assert (await engine.post("/generate", {"text": "a", **leg, **TOKENS})).status_code == 200
        page = await scrape(engine)
        assert finished(page) == {}
        assert page.total("pdserve_generation_tokens_total") == 0
        assert page.total("pdserve_time_to_first_token_seconds_count") == 0
        assert page.total("pdserve_prefill_legs_finished_total", outcome="handed_over") == 1
        assert page.total("pdserve_prefill_leg_queue_seconds_sum", role="prefill") == pytest.approx(0.00123456)
        # Without a room it serves the request itself, and it is a client's.
        assert (await engine.post("/generate", {"text": "a", **TOKENS})).status_code == 200
        assert finished(await scrape(engine)) == {"length": 1}

    with_engine(run, disaggregation_mode="prefill")


def test_a_decode_counts_the_request_and_what_its_transfer_took() -> None:
    async def run(engine: FakeEngine) -> None:
        leg = {"bootstrap_host": "h", "bootstrap_room": 4}
        await engine.post("/generate", {"text": "a", **leg, **TOKENS})
        await engine.post("/generate", {"text": "a", **TOKENS})
        page = await scrape(engine)
        assert finished(page) == {"length": 2}
        assert page.total("pdserve_request_transfer_seconds_count", role="decode") == 1
        assert page.total("pdserve_prefill_legs_finished_total") == 0

    with_engine(run, disaggregation_mode="decode")


def test_an_answer_of_no_tokens_counts_none() -> None:
    async def run(engine: FakeEngine) -> None:
        answer = await engine.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}})
        assert answer.json()["meta_info"]["completion_tokens"] == 0
        assert (await scrape(engine)).total("pdserve_generation_tokens_total") == 0

    with_engine(run)


def test_the_schedulers_figures_are_shown_once_it_has_spoken() -> None:
    async def run(engine: FakeEngine) -> None:
        assert "pdserve_requests" not in (await scrape(engine)).names()
        engine.client.dispatch([scheduler_metrics()])
        page = await scrape(engine)
        assert page.total("pdserve_requests", state="running") == 3
        assert page.total("pdserve_kv_pool_tokens") == page.total("pdserve_kv_pool_size_tokens") == 100
        assert page.total("pdserve_kv_pool_usage_ratio") == 0.2
        assert page.total("pdserve_prompt_tokens_total") == 100
        assert page.total("pdserve_prompt_tokens_total", source="cached") == 30
        assert page.total("pdserve_step_tokens_total", phase="prefill") == 75
        assert page.total("pdserve_step_duration_seconds_bucket", le="0.1") == 8
        assert page.total("pdserve_itl_budget_steps_total", outcome="kept") == 9
        assert page.total("pdserve_handovers_sent_total", outcome="failed") == 3
        assert page.total("pdserve_kv_received_bytes_total") == 4000
        assert page.total("pdserve_kv_host_tokens", state="free") == 110
        assert page.total("pdserve_kv_tier_tokens_total", source="store", target="host") == 40
        assert page.total("pdserve_prefix_cache_beyond_tokens_total") == 20
        assert page.total("pdserve_kv_store_state") == page.total("pdserve_kv_store_state", state="open") == 1
        engine.client.dispatch([scheduler_metrics(without=("itl_budget", "cost_model", "handovers", "tiers"))])
        names = (await scrape(engine)).names()
        assert names.isdisjoint({"pdserve_itl_budget_steps_total", "pdserve_kv_sent_bytes_total"})
        assert not any(name.startswith(("pdserve_kv_host", "pdserve_kv_store", "pdserve_kv_tier")) for name in names)

    with_engine(run)


@pytest.mark.parametrize(("vocabulary", "dashboard"), [("vllm", VLLM_DASHBOARD), ("sglang", SGLANG_DASHBOARD)])
def test_aliases_are_what_the_other_servers_dashboards_ask_for(vocabulary: str, dashboard: str) -> None:
    async def run(engine: FakeEngine) -> None:
        engine.client.dispatch([scheduler_metrics()])
        await engine.post("/generate", {"text": "a", "stream": True, **TOKENS})
        page = await scrape(engine)
        assert set(dashboard.split()) - page.names() == set()
        aliases = [s for s in page.samples if s.name.startswith(f"{vocabulary}:")]
        assert {s.labels["model_name"] for s in aliases} == {"smollm2"}
        assert page.total(f"{vocabulary}:time_to_first_token_seconds_count") == 1
        assert page.total(f"{vocabulary}:generation_tokens_total") == 5
        assert page.total(f"{vocabulary}:prompt_tokens_total") == 100
        running = "vllm:num_requests_running" if vocabulary == "vllm" else "sglang:num_running_reqs"
        assert page.total(running) == 2 + 3
        if vocabulary == "vllm":
            assert page.total("vllm:request_success_total", finished_reason="length") == 1
        else:
            assert page.total("sglang:cache_hit_rate") == pytest.approx(0.3)

    with_engine(run, metrics_aliases=vocabulary)


def test_growth_between_two_scrapes() -> None:
    growth = Growth(base=10.0, least=1.0)
    assert growth.ratio(50, 12.0) == 25.0
    assert growth.ratio(60, 12.5) == 25.0  # too soon
    assert growth.ratio(60, 22.0) == 1.0


def test_no_alias_without_the_option() -> None:
    async def run(engine: FakeEngine) -> None:
        engine.client.dispatch([scheduler_metrics()])
        assert all(name.startswith(("pdserve_", "process_")) for name in (await scrape(engine)).names())

    with_engine(run)


@pytest.mark.parametrize(("options", "status"), [({}, 401), ({"metrics_without_key": True}, 200)])
def test_metrics_need_the_key_unless_they_are_open(options: dict[str, Any], status: int) -> None:
    async def run(engine: FakeEngine) -> None:
        assert (await engine.get("/metrics")).status_code == status
        assert (await engine.get("/server_info")).status_code == 401

    with_engine(run, api_key="secret", **options)


def test_late_output_of_a_request_whose_client_left_is_not_counted() -> None:
    async def run(engine: FakeEngine) -> None:
        engine.end_aborted = False
        asked = asyncio.create_task(engine.post("/generate", {"text": "a"}))
        await engine.wait_for(lambda: len(engine.requests) == 1)
        [live] = engine.client.live._by_wire_rid.values()
        assert live is not None
        asked.cancel()
        await asyncio.wait([asked])
        await engine.wait_for(lambda: len(engine.aborts) == 1)
        engine.client.dispatch([TextBatch([ReqText(engine.requests[0].rid, "late", [1, 2])])])
        page = await scrape(engine)
        assert page.total("pdserve_generation_tokens_total") == 0
        assert sum(finished(page).values()) == 1

    with_engine(run, hold=True)


def test_every_way_in_which_a_request_or_a_leg_ends_is_shown() -> None:
    async def run(engine: FakeEngine) -> None:
        page = await scrape(engine)
        ends = {"timeout", "abort", "error", "client_gone", "moved"}
        for reason in (*ends, "stop", "length"):
            assert page.total("pdserve_requests_finished_total", reason=reason) == 0
        for outcome in (*ends, "handed_over", "declined"):
            assert page.total("pdserve_prefill_legs_finished_total", outcome=outcome) == 0
        leg = {"bootstrap_host": "h", "bootstrap_room": 4}
        engine.hold = True
        for number, finish in enumerate(FinishType):
            asked = asyncio.create_task(engine.post("/generate", {"text": "a", **leg, **TOKENS}))
            while len(engine.requests) == number:
                await asyncio.sleep(0)
            engine.client.dispatch([TextBatch([engine.text(engine.requests[number], "", [], finish)])])
            assert (await asked).status_code == 200
        page = await scrape(engine)
        assert page.total("pdserve_prefill_legs_finished_total") == len(FinishType)
        for outcome in ("timeout", "stop", "declined", "abort", "handed_over"):
            assert page.total("pdserve_prefill_legs_finished_total", outcome=outcome) == 1

    with_engine(run, disaggregation_mode="prefill")
