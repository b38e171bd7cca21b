"""Answers that begin at one instance and end at another: two HTTP apps, each before a fake engine."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from support.fake_engine import FakeEngine
from support.machine import limit
from support.served_app import serving

from pdserve.messages.control import Drained
from pdserve.messages.moves import ReqArrived, ReqMoved
from pdserve.messages.outputs import FinishType, ReasoningReport, TextBatch
from pdserve.messages.sampling import SamplingParams
from pdserve.runtime.answer_keys import AnswerKeys
from pdserve.runtime.web.apis import LLAMA_STREAM, OLLAMA_LINES
from pdserve.runtime.web.client import events
from pdserve.runtime.web.moved_answer import FOLLOW, MOVED_TYPE, TICKET, Ticket
from pdserve.runtime.web.sse import OPENAI_STREAM, StreamFormat
from pdserve.server.http.engine import moved_answers
from pdserve.server.http.engine.logprob_account import LogprobAccount
from pdserve.server.http.engine.plan import Prompt, PromptPlan
from pdserve.server.http.errors import ApiError
from tests.unit.server.test_http_tools import CALL, CHAT, QWEN, TOOL, USER, arguments, fold

KEY = "k" * 32
FOLLOWS = {FOLLOW.decode(): "1"}
GENERATE, COMPLETIONS = "/generate", "/v1/completions"


class Two:
    """``old`` has the client; ``new`` goes on."""

    def __init__(self, stack: AsyncExitStack, template: str = "") -> None:
        self._stack = stack
        self.old, self.new = (FakeEngine(hold=True, template=template) for _ in range(2))
        self.ports: list[int] = []
        self.client = httpx.AsyncClient(timeout=limit(10))

    async def start(self) -> Two:
        for engine in (self.old, self.new):
            self.ports.append(await self._stack.enter_async_context(serving(engine)))
        await self._stack.enter_async_context(self.client)
        return self

    def ask(
        self, path: str, body: dict[str, Any], headers: dict[str, str], at: int = 0
    ) -> asyncio.Task[httpx.Response]:
        url = f"http://127.0.0.1:{self.ports[at]}{path}"
        return asyncio.create_task(self.client.post(url, json=body, headers=headers))

    def say(self, engine: FakeEngine, rid: str, first: int, last: int, *, ends: bool = False) -> None:
        """Send output tokens ``first`` to ``last`` of the one request there is."""
        text = "".join(f"w{i} " for i in range(first, last))
        item = engine.text(self.old.requests[0], text, list(range(first, last)), FinishType.LENGTH if ends else None)
        item.rid = rid
        engine.client.dispatch([TextBatch([item])])

    def move(self, reported: int = 3) -> None:
        """Move the request to the new instance, after ``reported`` tokens."""
        rid = self.old.requests[0].rid
        self.new.client.dispatch([ReqArrived(rid + "@1", KEY, 1.0, reported)])
        self.say(self.new, rid + "@1", 0, reported)
        self.old.client.dispatch([ReqMoved(rid, "epoch", "127.0.0.1", self.ports[1], KEY)])


def scene(check, template: str = ""):
    async def run() -> None:
        async with AsyncExitStack() as stack:
            await check(await Two(stack, template).start())

    return lambda: asyncio.run(run())


def texts(answer: str, path: str) -> list[str]:
    found = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return [
        e["text"] if path == GENERATE else e["choices"][0]["text"] for e in found if path == GENERATE or e["choices"]
    ]


BODIES = {
    GENERATE: {"text": "hi", "rid": "x", "stream": True},
    COMPLETIONS: {"prompt": "hi", "rid": "x", "stream": True},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_can_follow_is_told_where_and_gets_the_rest_there(path):
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(path, BODIES[path], FOLLOWS)
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.say(two.old, "x", 0, 2)
        await asyncio.sleep(0)  # let it be read
        two.move()
        answer = (await asked).text
        assert "[DONE]" not in answer
        head, _, ticket = answer.rpartition("event: moved\ndata: ")
        reported = json.loads(ticket)
        assert (reported["key"], reported["port"], reported["rid"]) == (KEY, two.ports[1], "x")
        rest = two.ask(path, BODIES[path], {TICKET.decode(): ticket.strip()}, at=1)
        two.say(two.new, "x@1", 3, 5, ends=True)
        answer = (await rest).text
        assert answer.endswith("data: [DONE]\n\n")
        whole = "w0 w1 w2 w3 w4 "
        if path == GENERATE:  # everything so far, each time
            assert texts(answer, path)[-1] == whole
        else:
            assert "".join(texts(head, path) + texts(answer, path)) == whole
            assert {json.loads(line[6:])["id"] for line in answer.splitlines() if line.startswith("data: {")} == {"x"}
        assert two.old.aborts == two.new.aborts == []
        assert len(two.old.client.live) == len(two.new.client.live) == 0
        assert two.old.client.metrics.finished["moved"] == 1
        assert two.new.client.metrics.generation_tokens == 2  # the others are the old one's

    run()


@pytest.mark.parametrize("stream", [True, False])
def test_for_one_that_cant_it_is_read_there(stream):
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE] | {"stream": stream}, {})
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.say(two.old, "x", 0, 2)
        two.move()
        drained: list[Any] = []
        two.old.client._supervisor = type("Supervisor", (), {"send": lambda _, message: drained.append(message)})()
        two.old.client.dispatch([Drained()])
        await asyncio.sleep(0)
        assert drained == []  # its client still reads
        two.say(two.new, "x@1", 3, 5, ends=True)
        answer = await asked
        text = texts(answer.text, GENERATE)[-1] if stream else answer.json()["text"]
        assert text == "w0 w1 w2 w3 w4 "
        while not drained:
            await asyncio.sleep(0)
        assert len(two.old.client.live) == len(two.new.client.live) == 0

    run()


def test_an_answer_of_which_nothing_was_sent_is_had_whole_there():
    @scene
    async def run(two: Two) -> None:
        body = BODIES[GENERATE] | {"stream": False}
        asked = two.ask(GENERATE, body, FOLLOWS)
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.say(two.old, "x", 0, 2)
        two.move()
        answer = await asked
        assert answer.headers["content-type"] == MOVED_TYPE.decode()
        rest = two.ask(GENERATE, body, {TICKET.decode(): answer.text}, at=1)
        two.say(two.new, "x@1", 3, 5, ends=True)
        assert (await rest).json()["text"] == "w0 w1 w2 w3 w4 "

    run()


def test_a_ticket_may_be_there_before_its_answer():
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE], FOLLOWS)
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.old.client.dispatch([ReqMoved("x", "epoch", "127.0.0.1", two.ports[1], KEY)])
        rest = two.ask(GENERATE, BODIES[GENERATE], {TICKET.decode(): (await asked).text}, at=1)
        while not two.new.client.moved._awaited:
            await asyncio.sleep(0)
        two.new.client.dispatch([ReqArrived("x@1", KEY, 1.0, 3)])
        two.say(two.new, "x@1", 0, 3)
        two.say(two.new, "x@1", 3, 5, ends=True)
        assert texts((await rest).text, GENERATE)[-1] == "w0 w1 w2 w3 w4 "

    run()


def test_a_ticket_is_good_once_and_a_wrong_one_never(monkeypatch):
    monkeypatch.setattr(moved_answers, "ARRIVAL_SECONDS", 0.05)

    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE], FOLLOWS)
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.move()
        ticket = (await asked).text
        for wrong in ("{}", "x", ticket.replace(KEY, "other" * 8), ticket.replace('"chars": 0', '"chars": -1')):
            answer = await two.ask(GENERATE, BODIES[GENERATE], {TICKET.decode(): wrong}, at=1)
            assert answer.status_code in (400, 404), answer.text
        rest = two.ask(GENERATE, BODIES[GENERATE], {TICKET.decode(): ticket}, at=1)
        while two.new.client.moved._parked:
            await asyncio.sleep(0)
        again = await two.ask(GENERATE, BODIES[GENERATE], {TICKET.decode(): ticket}, at=1)
        assert again.status_code == 404
        two.say(two.new, "x@1", 3, 5, ends=True)
        assert (await rest).text.endswith("data: [DONE]\n\n")

    run()


def test_an_answer_that_is_not_fetched_ends(monkeypatch):
    monkeypatch.setattr(moved_answers, "UNREAD_SECONDS", 0.05)

    @scene
    async def run(two: Two) -> None:
        two.new.client.dispatch([ReqArrived("x@1", KEY, 1.0, 0)])
        await two.new.wait_for(lambda: bool(two.new.aborts))
        assert two.new.aborts[0].rid == "x@1"

    run()


def test_a_client_that_leaves_ends_it_where_it_goes_on():
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE], {})
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.say(two.old, "x", 0, 2)
        two.move()
        while two.new.client.moved._parked:
            await asyncio.sleep(0)
        asked.cancel()
        await two.new.wait_for(lambda: bool(two.new.aborts))
        while len(two.old.client.live):
            await asyncio.sleep(0)
        assert [abort.rid for abort in two.new.aborts] == ["x@1"]

    run()


def test_an_abort_by_name_ends_the_answer_of_a_client_that_cant_follow():
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE] | {"stream": False}, {})
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.say(two.old, "x", 0, 2)
        two.move()
        while two.new.client.moved._parked:
            await asyncio.sleep(0)
        assert (await two.ask("/abort_request", {"rid": "x"}, {})).json() == {"aborted": 1, "legs": 0}
        answer = (await asked).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["text"] == "w0 w1 w2 "
        await two.new.wait_for(lambda: bool(two.new.aborts))

    run()


def test_an_instance_that_dies_with_the_rest_is_an_error():
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE], {})
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.say(two.old, "x", 0, 2)
        two.old.client.dispatch([ReqMoved("x", "epoch", "127.0.0.1", 1, KEY)])
        answer = (await asked).text
        assert "goes on, is gone" in answer
        assert answer.endswith("data: [DONE]\n\n")

    run()


@pytest.mark.parametrize("first_ends", [True, False])
def test_several_answers_are_read_there_each_to_its_end(first_ends):
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, {"text": "hi", "rid": "x", "sampling_params": {"n": 2}}, {})
        await two.old.wait_for(lambda: len(two.old.requests) == 2)
        for i in range(2):
            rid, key = f"x-{i}", f"{i}" * 32
            two.new.client.dispatch([ReqArrived(rid + "@1", key, 1.0, 0)])
            two.old.client.dispatch([ReqMoved(rid, "epoch", "127.0.0.1", two.ports[1], key)])
        while two.new.client.moved._parked:
            await asyncio.sleep(0)
        order = ["x-0@1", "x-1@1"] if first_ends else ["x-1@1", "x-0@1"]
        two.say(two.new, order[0], 0, 2, ends=True)
        while len(two.old.client.moved._relays) == 2:
            await asyncio.sleep(0)
        two.say(two.new, order[1], 0, 3, ends=True)
        answer = await asked
        assert answer.status_code == 200, answer.text
        expected = ["w0 w1 ", "w0 w1 w2 "]
        assert [a["text"] for a in answer.json()] == (expected if first_ends else expected[::-1])
        assert len(two.old.client.live) == len(two.new.client.live) == 0

    run()


def test_what_was_counted_elsewhere_is_not_counted_again():
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE], {})
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.say(two.old, "x", 0, 2)
        two.move()
        two.say(two.new, "x@1", 3, 5, ends=True)
        assert (await asked).status_code == 200
        old, new = two.old.client.metrics, two.new.client.metrics
        assert (old.generation_tokens, new.generation_tokens) == (2, 2)
        assert (sum(old.ttft.counts), sum(new.ttft.counts)) == (1, 0)
        assert (dict(old.finished), dict(new.finished)) == ({"moved": 1}, {"length": 1})

    run()


def test_who_moves_on_is_followed_again():
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE], FOLLOWS)
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.move()
        rest = two.ask(GENERATE, BODIES[GENERATE], FOLLOWS | {TICKET.decode(): (await asked).text}, at=1)
        while two.new.client.moved._parked:
            await asyncio.sleep(0)
        two.new.client.dispatch([ReqMoved("x@1", "third", "127.0.0.1", 1, KEY)])
        assert '"epoch": "third"' in (await rest).text

    run()


def test_an_unread_answer_is_waited_for_before_the_drain_ends():
    @scene
    async def run(two: Two) -> None:
        asked = two.ask(GENERATE, BODIES[GENERATE], FOLLOWS)
        await two.old.wait_for(lambda: bool(two.old.requests))
        two.move()
        two.say(two.new, "x@1", 3, 5, ends=True)
        drained: list[Any] = []
        two.new.client._supervisor = type("Supervisor", (), {"send": lambda _, message: drained.append(message)})()
        two.new.client.dispatch([Drained()])
        assert drained == []
        rest = await two.ask(GENERATE, BODIES[GENERATE], {TICKET.decode(): (await asked).text}, at=1)
        assert texts(rest.text, GENERATE)[-1] == "w0 w1 w2 w3 w4 "
        assert len(drained) == 1

    run()


def test_a_key_that_was_made_up_is_refused_at_once_and_a_genuine_one_waited_for():
    async def run() -> None:
        keys = AnswerKeys("the instance's secret")
        answers = moved_answers.MovedAnswers(LogprobAccount(), AnswerKeys("the instance's secret"))
        plan = PromptPlan(Prompt(), SamplingParams(seed=0), 1, "x", True, None, None, "")

        def take(key: str) -> asyncio.Task[Any]:
            ticket = Ticket("e", "127.0.0.1", 1, key, 0, 0, opened=False, rid="x", created=0)
            return asyncio.create_task(answers.take(ticket, plan, streaming=True))

        genuine = keys.draw()
        for key in (KEY, "", "k", "0" * 64, genuine[:-1] + "xyz"[genuine[-1] == "x"], AnswerKeys("other").draw()):
            with pytest.raises(ApiError, match="no moved answer"):
                await asyncio.wait_for(take(key), 1)
            assert answers._awaited == {}
        waits = take(genuine)
        while not answers._awaited:
            await asyncio.sleep(0)
        answers.park(ReqArrived("x", genuine, 1.0, 3), lambda submission: None)
        assert (await waits).choices[0].rid == "x"

    asyncio.run(run())


class Peer:
    """A server that answers ``/moved`` with ``sent`` in the place of an instance."""

    def __init__(self, sent: bytes) -> None:
        self._sent = sent

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + self._sent)
        await writer.drain()
        writer.close()


def answer_from_a_peer(sent: bytes, *, stream: bool = False) -> dict[str, Any]:
    """Return the error of a request with an answer that continues at a peer that sends ``sent``."""
    error: dict[str, Any] = {}

    @scene
    async def run(two: Two) -> None:
        peer = await asyncio.start_server(Peer(sent).answer, "127.0.0.1", 0)
        async with peer:
            asked = two.ask(GENERATE, BODIES[GENERATE] | {"stream": stream}, {})
            await two.old.wait_for(lambda: bool(two.old.requests))
            two.say(two.old, "x", 0, 2)
            port = peer.sockets[0].getsockname()[1]
            two.old.client.dispatch([ReqMoved("x", "epoch", "127.0.0.1", port, KEY)])
            error.update((await asked).json()["error"])

    run()
    return error


@pytest.mark.parametrize(
    "sent",
    [
        b"data: \xff\xfe\n\n",
        b'data: {"error": 1}\n\n',
        b'data: {"error": {"status": "x"}}\n\n',
        b"data: 1\n\n",
        b"data: x",
        b"x" * 5000,
    ],
)
def test_what_a_peer_sends_that_makes_no_sense_is_an_error_and_no_wait(monkeypatch, sent):
    monkeypatch.setattr(events, "MAX_EVENT_BYTES", 1000)
    error = answer_from_a_peer(sent)
    assert error["status"] == 502
    assert "this answer" in error["message"]


def test_whatever_fails_in_reading_a_peer_reaches_the_client(monkeypatch):
    class Broken:
        def decode(self, content: bytes) -> None:
            raise ValueError("no number of this kind")

    monkeypatch.setattr(moved_answers, "_ITEM", Broken())
    assert "no number of this kind" in answer_from_a_peer(b"data: {}\n\n")["message"]


def test_an_error_of_a_peer_keeps_what_it_says():
    said = {"message": "too late", "type": "timeout_error", "param": "timeout_s", "code": "late", "status": 408}
    error = answer_from_a_peer(b"data: " + json.dumps({"error": said}).encode() + b"\n\n")
    assert error == said | {"message": error["message"]}
    assert "too late" in error["message"]


@pytest.mark.parametrize("how_it_ends", ["there", "by name"])
def test_the_reasoning_of_a_relayed_answer_is_counted_to_its_end(how_it_ends):
    output = "<think>Rome.</think>So"
    body = {"messages": [USER], "rid": "x", "stream": True, "stream_options": {"include_usage": True}}

    def say(engine: FakeEngine, two: Two, rid: str, first: int, last: int, finish: FinishType | None = None) -> None:
        item = engine.text(two.old.requests[0], output[first:last], list(range(first, last)), finish)
        item.rid, item.reasoning = rid, ReasoningReport(False, min(last, 20))
        engine.client.dispatch([TextBatch([item])])

    async def run(two: Two) -> None:
        asked = two.ask(CHAT, body, {})
        await two.old.wait_for(lambda: bool(two.old.requests))
        say(two.old, two, "x", 0, 3)
        two.new.client.dispatch([ReqArrived("x@1", KEY, 1.0, 3)])
        say(two.new, two, "x@1", 0, 3)
        two.old.client.dispatch([ReqMoved("x", "epoch", "127.0.0.1", two.ports[1], KEY)])
        say(two.new, two, "x@1", 3, 9)
        choice = two.old.client.moved._relays["x"].choice
        while choice.completion_tokens < 9:
            await asyncio.sleep(0)
        if how_it_ends == "there":
            say(two.new, two, "x@1", 9, len(output), FinishType.STOP)
        else:
            await two.ask("/abort_request", {"rid": "x"}, {})
        lines = [line for line in (await asked).text.splitlines() if line.startswith("data: {")]
        usage = json.loads(lines[-1][6:])["usage"]
        expected = (len(output), 20) if how_it_ends == "there" else (9, 9)
        assert (usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]) == expected

    scene(run, QWEN)()


OUTPUT = f"<think>\nRome.\n</think>\n\nSo:\n{CALL}\n{CALL.replace('Rome', 'Bari')} done"


def moved_streams(path: str, framing: StreamFormat, body: dict[str, Any]) -> list[bytes]:
    """Return streams of ``OUTPUT`` that were read in two halves, which meet after another character in each."""

    def say(engine: FakeEngine, two: Two, rid: str, text: str, at: int, *, begins: bool, ends: bool = False) -> None:
        item = engine.text(
            two.old.requests[0], text, list(range(at, at + len(text))), FinishType.STOP if ends else None
        )
        item.rid, item.reasoning = rid, ReasoningReport(False) if begins else None
        engine.client.dispatch([TextBatch([item])])

    async def move(two: Two, at: int) -> bytes:
        asked = two.ask(path, body, FOLLOWS)
        await two.old.wait_for(lambda: bool(two.old.requests))
        say(two.old, two, "x", OUTPUT[:at], 0, begins=True)
        await asyncio.sleep(0)
        two.new.client.dispatch([ReqArrived("x@1", KEY, 1.0, at)])
        say(two.new, two, "x@1", OUTPUT[:at], 0, begins=True)
        two.old.client.dispatch([ReqMoved("x", "epoch", "127.0.0.1", two.ports[1], KEY)])
        head, ticket = framing.split_moved((await asked).content)
        assert ticket is not None
        rest = two.ask(path, body, {TICKET.decode(): ticket.decode()}, at=1)
        say(two.new, two, "x@1", OUTPUT[at:], at, begins=False, ends=True)
        return head + (await rest).content

    found: list[bytes] = []
    for at in range(1, len(OUTPUT), 9):

        async def check(two: Two, at: int = at) -> None:
            found.append(await move(two, at))

        scene(check, QWEN)()
    return found


def test_calls_and_reasoning_go_on_where_the_answer_does():
    """Whatever the character after which it moves, both halves of the stream add up to the whole answer."""
    body = {"messages": [USER], "tools": [TOOL], "rid": "x", "stream": True, "max_tokens": 900}
    messages = [
        fold([json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")])
        for stream in moved_streams(CHAT, OPENAI_STREAM, body)
    ]
    assert messages == [messages[0]] * len(messages)
    assert (messages[0]["reasoning_content"], messages[0]["content"]) == ("Rome.", "So:\n\n done")
    assert arguments(messages[0]) == [{"city": "Rome"}, {"city": "Bari"}]


def test_lines_of_json_go_on_where_the_answer_does():
    body = {"messages": [USER], "tools": [TOOL], "rid": "x", "options": {"num_predict": 900}}
    added = []
    for stream in moved_streams("/api/chat", OLLAMA_LINES, body):
        lines = [json.loads(line) for line in stream.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        parts = [line["message"] for line in lines]
        texts = ["".join(part.get(name, "") for part in parts) for name in ("thinking", "content")]
        added.append((texts, [call for part in parts for call in part.get("tool_calls", ())], lines[-1]["eval_count"]))
    assert added == [added[0]] * len(added)
    (texts, calls, count) = added[0]
    assert (texts, count) == (["Rome.", "So:\n\n done"], len(OUTPUT))
    assert [call["function"]["arguments"] for call in calls] == [{"city": "Rome"}, {"city": "Bari"}]


def test_a_completion_of_llama_servers_goes_on_where_the_answer_does():
    body = {"prompt": "a", "rid": "x", "stream": True, "n_predict": 900}
    added = []
    for stream in moved_streams("/completion", LLAMA_STREAM, body):
        events = [json.loads(line[6:]) for line in stream.splitlines() if line]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        tokens = [token for event in events for token in event["tokens"]]
        added.append(("".join(event["content"] for event in events), tokens, events[-1]["tokens_predicted"]))
    assert added == [added[0]] * len(added)
    assert added[0][0] == OUTPUT
    assert len(added[0][1]) == added[0][2]
