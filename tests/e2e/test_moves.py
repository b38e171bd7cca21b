"""Two unified instances that hand over in both directions: a prompt's KV, and a stream while it is read.

A moved stream has the tokens, text and logprobs of one that stayed.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product

import httpx
import pytest
from support.machine import limit
from support.processes import ONE_THREAD, Launched, free_ports, launched, wait_until
from support.reader import Reader
from support.scrape import Page

from tests.e2e import test_cluster

LONG = 600
"""Tokens: a stream that can be met in the middle."""
PROMPT = [(i * 13 + 11) % 40000 + 100 for i in range(200)]
WAYS = ("direct", "router")
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
TIMELINE = ["bootstrap", "allocate", "queue", "prefill", "first_byte", "last_byte", "verify", "first_step"]


class Two:
    """Two equal instances, and a router before them."""

    def __init__(self, instances: list[Launched], bootstraps: list[int], control: int, router: Launched) -> None:
        self.instances, self.bootstraps, self.router = instances, bootstraps, router
        self.control = control
        """Port of the first instance for control connections."""
        self.stayed: dict[str, dict] = {}
        """Answers that stayed where they were, by what was asked."""

    def holder(self, rid: str) -> int:
        """Return the number of the instance that has a request."""
        for i, instance in enumerate(self.instances):
            if instance.info()["requests"]["total"]:
                return i
        raise AssertionError(f"nobody has {rid}")

    def migrate(self, rid: str, source: int) -> httpx.Response:
        """Move a request from ``source`` to the other instance."""
        to = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstraps[1 - source]}
        return self.instances[source].post("/migrate", {"rid": rid, **to})

    def assert_all_returned(self) -> None:
        """Assert that nothing is in use, and that the instances' own checks agree."""
        for instance in self.instances:
            wait_until(
                lambda i=instance: (i.info()["requests"]["total"], i.info()["pool"]["in_use"]) == (0, 0), 15, "idle"
            )
            wait_until(lambda i=instance: i.info()["invariants_steps_ago"] == 0, 15, "checked")
            assert instance.info()["invariants"] == "ok"


@contextmanager
def two(tmp_path, backend: str, *args: str):
    bootstraps, fixed = free_ports(2), free_ports(2)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        instances = []
        for i, port in enumerate(bootstraps):
            own = ["--handover", "on", "--disaggregation-bootstrap-port", str(port), *ONE_THREAD]
            own += ["--disaggregation-transfer-backend", backend, "--cpus", str(cores[i % len(cores)])]
            if i == 0:
                own += ["--disaggregation-control-port", str(fixed[0]), "--disaggregation-data-port", str(fixed[1])]
            instances.append(stack.enter_context(launched(tmp_path, f"i{i}", "server", *own, *args)))
        workers = [word for instance in instances for word in ("--worker", instance.url)]
        router = stack.enter_context(launched(tmp_path, "router", "router", *workers))
        for server in (*instances, router):
            server.wait_healthy()
        yield Two(instances, bootstraps, fixed[0], router)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_args):
    with two(tmp_path_factory.mktemp("two"), "shm", *tiny_args) as found:
        yield found


def body(rid: str, **more) -> dict:
    params = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": LONG, "ignore_eos": True}
    return {"rid": rid, "input_ids": PROMPT, "sampling_params": params, "stream": True, **more}


def whole(pair: Two, asked: dict) -> dict:
    """Return the answer of an equal request that stays where it is. It is asked once, whatever its name."""
    key = json.dumps(asked | {"stream": False, "rid": ""})
    if key not in pair.stayed:
        pair.stayed[key] = pair.instances[0].generate(**asked | {"stream": False, "rid": asked["rid"] + "-stays"})
    return pair.stayed[key]


# A stream by the router moves below too, with a grammar.
@pytest.mark.parametrize("way", ["direct", pytest.param("router", marks=pytest.mark.slow)])
def test_a_moved_stream_has_the_tokens_of_one_that_stays(pair, way):
    asked = body(f"moves-{way}", return_logprob=True, top_logprobs_num=2)
    expected = whole(pair, asked)
    reader = Reader((pair.router if way == "router" else pair.instances[0]).url, GENERATE, asked)
    reader.start()
    reader.met(20)
    source = pair.holder(asked["rid"])
    answer = pair.migrate(asked["rid"], source)
    assert answer.status_code == 200, answer.text
    assert answer.json()["moved"] == 1
    last = reader.ended()[-1]
    assert len(last["output_ids"]) == LONG
    assert last["output_ids"] == expected["output_ids"]
    assert last["text"] == expected["text"]
    names = ("id", "finish_reason", "prompt_tokens", "completion_tokens")
    assert {n: last["meta_info"][n] for n in names[1:]} == {n: expected["meta_info"][n] for n in names[1:]}
    assert last["meta_info"]["id"] == asked["rid"]
    scores, right = (answer["meta_info"]["output_token_logprobs"] for answer in (last, expected))
    assert [token for _, token, _ in scores] == last["output_ids"]
    assert [score for score, _, _ in scores] == pytest.approx([score for score, _, _ in right], abs=1e-4)
    counts = [len(event["output_ids"]) for event in reader.events]
    assert counts == sorted(counts)
    pair.assert_all_returned()


def test_a_moved_stream_matches_its_grammar_as_one_that_stays(pair):
    numbers = {"type": "array", "minItems": LONG, "items": {"type": "integer", "minimum": 0, "maximum": 99}}
    asked = body("grammar")
    asked["sampling_params"] |= {"json_schema": numbers, "ignore_eos": False}
    expected = whole(pair, asked)
    reader = Reader(pair.router.url, GENERATE, asked)
    reader.start()
    reader.met(20)
    answer = pair.migrate(asked["rid"], pair.holder(asked["rid"]))
    assert answer.status_code == 200, answer.text
    assert answer.json()["moved"] == 1
    last = reader.ended()[-1]
    assert last["output_ids"] == expected["output_ids"]
    assert set(last["text"]) <= set("[0123456789, \n\t")
    pair.assert_all_returned()


@pytest.mark.parametrize(
    ("path", "way"),
    # tests/unit/server/test_http_moved.py has the other paths.
    [
        (CHAT, "router"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((CHAT, "direct"), *product([COMPLETIONS], WAYS))),
    ],
)
def test_an_openai_stream_moves_as_if_it_had_not(pair, way, path):
    rid = f"openai-{way}-{path[-1]}"
    asked = {"rid": rid, "seed": 3, "max_tokens": LONG, "ignore_eos": True, "stream": True, "temperature": 0.7}
    asked |= {"stream_options": {"include_usage": True}, "logprobs": True if path == CHAT else 1}
    asked |= {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": PROMPT}
    stays = Reader(pair.instances[0].url, path, asked | {"rid": rid + "-stays"})
    stays.start()
    expected = stays.ended()
    reader = Reader((pair.router if way == "router" else pair.instances[0]).url, path, asked)
    reader.start()
    reader.met(30)
    answer = pair.migrate(rid, pair.holder(rid))
    assert answer.status_code == 200, answer.text
    events = reader.ended()
    assert {event["id"] for event in events} == {rid}
    assert len({event["created"] for event in events}) == 1
    assert said(events) == said(expected)
    assert [e["usage"]["completion_tokens"] for e in events if e.get("usage")] == [LONG]
    assert sum("role" in c.get("delta", {}) for e in events for c in e["choices"]) == (path == CHAT)
    pair.assert_all_returned()


def said(events: list[dict]) -> tuple[str, str | None, int]:
    """Return an OpenAI stream's text, how it ended, and how many tokens it scored."""
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    lists = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    scored = sum(len(entry.get("tokens") or entry.get("content") or ()) for entry in lists)
    return text, choices[-1]["finish_reason"], scored


@pytest.mark.parametrize("way", [pytest.param("direct", marks=pytest.mark.slow), "router"])
def test_an_answer_that_is_not_streamed_moves_too(pair, way):
    asked = body(f"whole-{way}", stream=False)
    expected = whole(pair, asked)
    got: list[dict] = []
    url = (pair.router if way == "router" else pair.instances[0]).url
    client = threading.Thread(
        target=lambda: got.append(httpx.post(url + GENERATE, json=asked, timeout=limit(120)).json())
    )
    client.start()
    wait_until(lambda: any(i.info()["requests"].get("running") for i in pair.instances), 30, "it runs")
    answer = pair.migrate(asked["rid"], pair.holder(asked["rid"]))
    assert answer.status_code == 200, answer.text
    client.join(limit(120))
    assert got[0]["output_ids"] == expected["output_ids"]
    assert got[0]["text"] == expected["text"]
    assert got[0]["meta_info"]["id"] == asked["rid"]
    pair.assert_all_returned()


def test_what_cant_be_moved_stays_and_says_why(pair):
    # The server there answers at once but is no bootstrap server; the stream goes on meanwhile.
    source, nowhere = pair.instances[0], pair.instances[1].port
    to = {"bootstrap_host": "127.0.0.1", "bootstrap_port": nowhere}
    assert source.post("/migrate", {"rid": "nobody", **to}).status_code == 404
    asked = body("stays")
    asked["sampling_params"]["max_new_tokens"] = 1700  # an address without an answer is tried for a second and a half
    expected = whole(pair, asked)
    reader = Reader(source.url, GENERATE, asked)
    reader.start()
    reader.met(5)
    own = source.post("/migrate", {"rid": "stays", **to, "bootstrap_port": pair.bootstraps[0]})
    assert own.status_code == 409
    assert "own" in own.text
    away = source.post("/migrate", {"rid": "stays", **to})
    assert away.status_code == 409
    assert "bootstrap server" in away.text
    assert reader.ended()[-1]["output_ids"] == expected["output_ids"]
    pair.assert_all_returned()


def test_unified_instances_hand_over_in_both_directions_by_one_connection(pair):
    assert_both_directions_work(pair)


@pytest.mark.slow
def test_unified_instances_hand_over_in_both_directions_by_tcp(tmp_path, tiny_args):
    with two(tmp_path, "tcp", *tiny_args) as found:
        assert_both_directions_work(found)


def both_legs(prefill: Launched, decode: Launched, **fields) -> list[httpx.Response]:
    """Return both answers of a request that names its hand-over itself."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda server: test_cluster.asked(server, **fields), (prefill, decode)))


def assert_both_directions_work(found: Two) -> None:
    """Hand over a prompt from the first instance, to it, and from it again. The two have one connection."""
    a, b = found.instances
    before = [(handovers(server), legs_counted(server)) for server in (a, b)]
    expected = test_cluster.asked(a).json()["output_ids"]
    for room, (prefill, decode) in enumerate([(a, b), (b, a), (a, b)]):
        for server in (a, b):
            assert server.post("/flush_cache", {}).status_code == 200
        port = prefill.info()["disaggregation"]["bootstrap_port"]
        sent, received = both_legs(prefill, decode, **test_cluster.named(room, port))
        assert (sent.status_code, received.status_code) == (200, 200)
        assert received.json()["output_ids"] == expected
        assert sent.json()["output_ids"] == expected[:1]
        timing = received.json()["meta_info"]["timing"]
        assert timing["transfer_bytes"] > 0
        points = timing["timeline"]
        assert list(points) == TIMELINE
        for earlier, later in (("bootstrap", "allocate"), ("first_byte", "last_byte")):
            assert 0 < points[earlier] <= points[later]
        # The prefill's leg may come first, and be queued before the decode has heard of the request.
        assert points["queue"] <= points["prefill"]
        assert points["allocate"] <= points["queue"]
        assert max(points["prefill"], points["last_byte"]) <= points["verify"] < points["first_step"]
    # Each instance counts its leg as one, and the client's answer where that was given: once.
    for server, (done, counted), sent_legs in zip((a, b), before, (2, 1), strict=True):
        change = [sent_legs, 3 - sent_legs]
        assert [new - old for new, old in zip(handovers(server), done, strict=True)] == change
        assert [new - old for new, old in zip(legs_counted(server), counted, strict=True)] == change
        peers = server.info()["disaggregation"]["peers"]
        assert [(p["state"], p["reading"], p["writing"]) for p in peers] == [("open", "ready", "ready")]
    assert a.info()["disaggregation"]["control_port"] == found.control
    found.assert_all_returned()


def handovers(server: Launched) -> tuple[int, int]:
    """Return how many hand-overs the instance has sent and received."""
    found = server.info()["disaggregation"]
    return found["sent"]["done"], found["received"]["done"]


def legs_counted(server: Launched) -> tuple[float, float]:
    """Return the same by its metrics."""
    page = Page(server.client.get(server.url + "/metrics").text)
    sent = page.total("pdserve_prefill_legs_finished_total", outcome="handed_over")
    return sent, page.total("pdserve_request_transfer_seconds_count")
