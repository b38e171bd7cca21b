"""A real pair: its counters add up to what clients got, and an id is found in the logs of all that served it."""

from __future__ import annotations

import json
import re
from collections import Counter

from support.processes import Launched, Pair, pd_pair, wait_until
from support.scrape import Page

PROCESSES = ("http", "tokenizer", "scheduler", "worker", "detokenizer")
PREFIX = list(range(100, 180))


def stream(server: Launched, path: str, body: dict, **headers: str) -> list[dict]:
    """Return every event of a streamed answer."""
    with server.client.stream("POST", server.url + path, json={**body, "stream": True}, headers=headers) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def scrape(server: Launched) -> Page:
    return Page(server.client.get(server.url + "/metrics").raise_for_status().text)


def load(pair: Pair) -> Counter[str]:
    """Send requests of many kinds, and return the sums of the counts in their answers."""
    counted: Counter[str] = Counter()

    def add(prompt: int, cached: int, output: int) -> None:
        counted.update(prompt=prompt, cached=cached, output=output, requests=1)

    def add_meta(answer: dict) -> None:
        meta = answer["meta_info"]
        add(meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"])

    greedy = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12}
    whole = pair.router.generate(input_ids=PREFIX, sampling_params=greedy)
    add_meta(whole)
    for i in range(4):
        body = {"input_ids": [*PREFIX, 1000 + i], "sampling_params": greedy}
        add_meta(stream(pair.router, "/generate", body)[-1])
    # A stop string cuts tokens that the scheduler has computed, and clients don't get.
    stopped = pair.router.generate(input_ids=PREFIX, sampling_params={**greedy, "stop": whole["text"][8:11]})
    assert stopped["meta_info"]["completion_tokens"] < 12
    add_meta(stopped)
    for answer in pair.router.generate(input_ids=[[7, 8, 9], PREFIX], sampling_params=greedy):
        add_meta(answer)
    body = {"prompt": [5] * 40, "max_tokens": 9, "ignore_eos": True, "stream_options": {"include_usage": True}}
    usage = stream(pair.router, "/v1/completions", body)[-1]["usage"]
    add(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"])
    # A decode that a client asks directly, with no prefill named.
    add_meta(pair.decode.generate(input_ids=[3] * 50, sampling_params=greedy))
    return counted


def test_counters_add_up_and_an_id_is_found_everywhere(tmp_path, tiny_args):
    flags = [*tiny_args, "--log-level", "debug", "--log-format", "json"]
    with pd_pair(tmp_path, "shm", *flags, router_args=["--log-level", "debug"]) as pair:
        counted = load(pair)
        traced = stream(pair.router, "/generate", {"input_ids": PREFIX}, **{"x-request-id": "find-me-again"})
        meta = traced[-1]["meta_info"]
        counted.update(prompt=meta["prompt_tokens"], cached=meta["cached_tokens"], output=meta["completion_tokens"])
        counted.update(requests=1)
        pair.assert_all_returned()
        prefill, decode = scrape(pair.prefill), scrape(pair.decode)

        def both(name: str, **labels: str) -> float:
            return prefill.total(name, **labels) + decode.total(name, **labels)

        assert counted["cached"] > 0
        assert both("pdserve_prompt_tokens_total", source="cached") == counted["cached"]
        assert both("pdserve_prompt_tokens_total") == counted["prompt"]
        assert both("pdserve_generation_tokens_total") == counted["output"]
        assert both("pdserve_requests_finished_total") == counted["requests"]
        assert both("pdserve_e2e_request_latency_seconds_count") == counted["requests"]
        assert prefill.total("pdserve_prefill_legs_finished_total", outcome="handed_over") == counted["requests"] - 1
        assert prefill.total("pdserve_kv_sent_bytes_total") == decode.total("pdserve_kv_received_bytes_total") > 0
        assert prefill.total("pdserve_requests_finished_total") == 0
        router = scrape(pair.router)
        assert router.total("pdserve_router_responses_total", path="/generate", status="200") == 8
        assert pair.router.client.get(pair.router.url + "/metrics/targets").json()[0]["labels"]["leg"] == "prefill"

        assert re.search(r'"POST /generate" 200 .* rid=find-me-again$', pair.router.log(), flags=re.MULTILINE)
        for server, mode in ((pair.prefill, "prefill"), (pair.decode, "decode")):
            wait_until(lambda s=server, m=mode: mentions(s, m) >= set(PROCESSES), 5, f"the id in all logs of a {mode}")


def mentions(server: Launched, mode: str) -> set[str]:
    """Return the processes with a log line about the request. Each line must be an object."""
    names = set()
    for line in server.log().splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # it is just being written
        entry = json.loads(line)
        role, name = entry["process"].split(" ")
        assert role == f"{mode}:{server.port}"
        if entry.get("rid", "").startswith("find-me-again-"):
            names.add(name)
    return names
