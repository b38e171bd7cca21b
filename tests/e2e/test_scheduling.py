"""Scheduling over HTTP: priorities, preemption, time limits and refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.machine import limit
from support.processes import Launched, launched, pd_pair, wait_until
from support.reader import Reader

MOST_ALIVE = 5
TERMS = ("--enable-priority-scheduling", "--fair-scheduling")
ONE_RUNS = ("--max-running-requests", "1", "--max-queued-requests", str(MOST_ALIVE - 1))

HOLDS = {"rid": "holder", "stream": True, "incremental": True}


def body(prompt: list[int], tokens: int, **more) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **more}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_args) -> Iterator[Launched]:
    """A server with one row: any further request waits, or takes the row."""
    with launched(tmp_path_factory.mktemp("terms"), "one", "server", *tiny_args, *TERMS, *ONE_RUNS) as one:
        one.wait_healthy()
        yield one


class Holder:
    """A request that has the only row, until ``let_go``."""

    def __init__(self, server: Launched, **more) -> None:
        self.server = server
        self.reader = Reader(server.url, "/generate", body([5, 6, 7], 1900, **HOLDS, **more))
        self.reader.start()
        self.reader.met(1)

    def let_go(self) -> None:
        self.server.post("/abort_request", {"rid": "holder"})
        self.reader.join(limit(30))


def cut_short(server: Launched) -> dict:
    """Return the answer to a request that runs out of time while it generates.

    The right limit depends on the machine, so it is searched for.
    """
    least, most = 0.0, 4.0
    for _ in range(12):
        response = server.post("/generate", body([4, 4, 4], 1900, timeout_s=(least + most) / 2))
        if response.status_code == 408:
            least = (least + most) / 2
            continue
        answer = response.raise_for_status().json()
        if answer["meta_info"]["finish_reason"]["type"] != "length":
            return answer
        most = (least + most) / 2
    raise AssertionError(f"never between the first token and the last one; between {least} and {most} s")


class Senders:
    """Requests in threads of their own; ``ended``: the names of answered requests, as these threads read the answers.

    Two answers that the server sends within milliseconds may be read in either order.
    """

    def __init__(self, server: Launched) -> None:
        self.server = server
        self.ended: list[str] = []
        self.threads: list[threading.Thread] = []

    def send(self, name: str, **fields) -> None:
        """Returns when it waits."""
        waiting = self.server.info()["queues"]["waiting"]

        def ask() -> None:
            self.server.generate(rid=name, **fields)
            self.ended.append(name)

        self.threads.append(threading.Thread(target=ask))
        self.threads[-1].start()
        wait_until(lambda: self.server.info()["queues"]["waiting"] > waiting, 10, f"{name} waits")

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(limit(30))
        return self.ended


def test_a_higher_priority_takes_the_memory_of_a_lower_one(server):
    alone = server.generate(**body([9, 8, 7], 500))
    low = Reader(server.url, "/generate", body([9, 8, 7], 500, stream=True, priority=-20))
    low.start()
    low.met(1)
    high = server.generate(**body([1, 2, 3], 4, priority=20))
    met = len(low.events)
    low.join(limit(60))
    assert low.error is None
    assert high["meta_info"]["retractions"] == 0
    assert low.events[-1]["meta_info"]["retractions"] == 1
    assert met < len(low.events)  # it went on behind
    assert low.events[-1]["text"] == alone["text"]
    assert low.events[-1]["meta_info"]["completion_tokens"] == 500


def test_a_priority_close_by_waits(server):
    low = Reader(server.url, "/generate", body([9, 8, 7], 300, stream=True))
    low.start()
    low.met(1)
    server.generate(**body([1, 2, 3], 4, priority=5))
    low.join(limit(60))
    assert low.error is None
    assert low.events[-1]["meta_info"]["retractions"] == 0


def test_waiting_too_long_is_a_408_and_generating_too_long_keeps_the_output(server):
    holder = Holder(server)
    late = server.post("/generate", body([4, 4, 4], 4, timeout_s=0.05))
    holder.let_go()
    assert late.status_code == 408
    assert "timeout_s of 0.05 s" in late.text
    answer = cut_short(server)
    assert answer["meta_info"]["finish_reason"]["type"] == "timeout"
    assert 0 < answer["meta_info"]["completion_tokens"] < 1900


def test_the_user_who_has_had_least_goes_first(server):
    holder, senders = Holder(server, user="other"), Senders(server)
    for i in range(3):
        senders.send(f"many{i}", **body([20 + i, 1, 2], 400, user="many"))
    senders.send("one", **body([30, 1, 2], 4, user="one"))
    holder.let_go()
    ended = senders.join()
    assert len(ended) == 4
    assert ended.index("one") < ended.index("many1")


def test_one_more_than_may_wait_is_told_when_to_come_back(server):
    holder, senders = Holder(server), Senders(server)
    for i in range(MOST_ALIVE - 1):
        senders.send(f"w{i}", **body([40 + i, 1, 2], 4))
    refused = server.post("/generate", body([50, 1, 2], 4))
    openai = server.post("/v1/completions", {"model": "default", "prompt": [50, 1, 2], "max_tokens": 4})
    holder.let_go()
    assert len(senders.join()) == MOST_ALIVE - 1
    for answer in (refused, openai):
        assert answer.status_code == 429, answer.text
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert "queued or running" in answer.text
    assert server.generate(**body([50, 1, 2], 4))["meta_info"]["completion_tokens"] == 4


@pytest.mark.slow
def test_a_pair_keeps_the_same_terms(tmp_path, tiny_args):
    with pd_pair(tmp_path, "tcp", *tiny_args, *TERMS, decode_args=ONE_RUNS) as pair:
        holder = Holder(pair.router)
        late = pair.router.post("/generate", body([4, 4, 4], 4, timeout_s=0.2))
        assert late.status_code == 408, late.text
        senders = [Reader(pair.router.url, "/generate", body([60 + i, 1], 3, stream=True)) for i in range(4)]
        for sender in senders:
            sender.start()
        wait_until(lambda: pair.decode.info()["requests"]["total"] == MOST_ALIVE, 20, "all of them are there")
        refused = pair.decode.post("/generate", body([50, 1, 2], 4))
        assert refused.status_code == 429, refused.text
        assert int(refused.headers["retry-after"]) >= 1
        holder.let_go()
        for sender in senders:
            sender.join(limit(30))
            assert sender.error is None
            assert sender.events[-1]["meta_info"]["completion_tokens"] == 3
        answer = cut_short(pair.router)
        assert answer["meta_info"]["finish_reason"]["type"] == "timeout", answer["meta_info"]
        pair.assert_all_returned()
