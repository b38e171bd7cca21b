"""Questions about text: the size of a question, the process that answers it, and that nothing else waits for the
answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from support.fake_engine import FakeEngine, with_engine
from support.machine import limit
from support.sim_ring import SimTokenizer

from pdserve.messages.base import Message
from pdserve.messages.conversation import ChatMessage, Conversation
from pdserve.messages.text import Decoded, DecodeReq, Encoded, EncodeReq
from pdserve.model_files.model_limits import ModelLimits
from pdserve.model_files.text.errors import PromptError
from pdserve.runtime.web.keys import SCOPE_KEY, Caller
from pdserve.server.http.engine.question_queue import MAX_WAITING, MAX_WAITING_WORK, SHORT, QuestionQueue
from pdserve.server.http.errors import ApiError
from pdserve.server.http.text.schemas import MAX_CHARACTERS
from pdserve.server.prompt_encoder import PIECE_CHARACTERS, MissingTemplate, PromptEncoder
from pdserve.server.question_thread import FAILED, QuestionThread
from pdserve.server.text_questions import MAX_TOKENS, TextQuestions

VOCAB = 100
LONG = SHORT + 1


class Counting(SimTokenizer):
    """Notes the characters of each text that it is given to encode."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        self.given += map(len, texts)
        return [[1] * len(text) for text in texts]

    @property
    def max_token_bytes(self) -> int:
        return 1 << 20


def answer(question: EncodeReq, context_length: int = 64) -> tuple[Encoded, list[int]]:
    tokenizer, limits = Counting(), ModelLimits(context_length, VOCAB)
    encoded = TextQuestions(PromptEncoder(tokenizer, MissingTemplate(), limits), tokenizer, limits).answer(question)
    assert isinstance(encoded, Encoded)
    return encoded, tokenizer.given


# --- how much ---


def test_an_answer_has_a_limit_of_tokens_in_all() -> None:
    half = "a" * (MAX_TOKENS // 2)
    context = 4 * MAX_TOKENS
    assert answer(EncodeReq(texts=[half, half], id=1), context)[0].error is None
    assert answer(EncodeReq(texts=[half, half], pieces=True, id=1), context)[0].error is None
    encoded, _ = answer(EncodeReq(texts=[half, half, "a"], pieces=True, id=1), context)
    assert encoded.error is not None
    assert f"more than {MAX_TOKENS} tokens" in encoded.error
    assert encoded.field == "text"
    # A prompt as long as the model takes may be counted, without strings.
    assert answer(EncodeReq(texts=[half] * 8, id=1), context)[0].error is None
    encoded, given = answer(EncodeReq(texts=[half] * 20, id=1), context)
    assert encoded.error is not None
    assert f"more than {context} tokens" in encoded.error
    assert len(given) == 9, "what follows is not encoded"


def test_a_rendered_conversation_is_returned_if_asked_for() -> None:
    def asked(*, returns: bool) -> Encoded:
        tokenizer, limits = Counting(), ModelLimits(64, VOCAB)
        questions = TextQuestions(PromptEncoder(tokenizer, MissingTemplate(), limits), tokenizer, limits)
        question = EncodeReq(chat=Conversation([ChatMessage("user", "a")]), returns_rendered=returns, id=1)
        encoded = questions.answer(question, "<user>a")
        assert isinstance(encoded, Encoded)
        return encoded

    assert asked(returns=True).rendered == "<user>a"
    assert asked(returns=False).rendered is None
    assert len(asked(returns=True).token_ids[0]) == len("<user>a")


def test_a_conversation_that_is_too_long_has_the_errors_code() -> None:
    tokenizer, limits = Counting(), ModelLimits(64, VOCAB)
    questions = TextQuestions(PromptEncoder(tokenizer, MissingTemplate(), limits), tokenizer, limits)
    question = EncodeReq(chat=Conversation([ChatMessage("user", "a")]), id=1)
    refused = PromptError("messages", "too many tokens", "context_length_exceeded")
    for rendered in (refused, "a" * (MAX_TOKENS + 1)):
        encoded = questions.answer(question, rendered)
        assert isinstance(encoded, Encoded)
        assert (encoded.field, encoded.code) == ("messages", "context_length_exceeded")
    assert answer(EncodeReq(texts=["a"] * (MAX_TOKENS + 1), id=1))[0].code is None, "no single text is too long"


def test_a_hopeless_text_is_refused_without_encoding_all_of_it() -> None:
    encoded, given = answer(EncodeReq(texts=["a" * (16 * PIECE_CHARACTERS)], id=1), MAX_TOKENS)
    assert encoded.error is not None
    assert max(given) <= PIECE_CHARACTERS
    assert sum(given) <= 2 * MAX_TOKENS + PIECE_CHARACTERS


def test_what_an_assistant_thought_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Queue(QuestionQueue):
        async def ask(self, request: Any, work: int, ask: Any, **more: Any) -> Any:
            asked.append(work)
            return await super().ask(request, work, ask, **more)

    monkeypatch.setattr("pdserve.server.http.app.QuestionQueue", Queue)

    async def check(engine: FakeEngine) -> None:
        for thought, status in (("a" * LONG, 200), ("a" * (MAX_CHARACTERS + 1), 400)):
            turns = [{"role": "assistant", "content": "b", "reasoning_content": thought}]
            response = await engine.post("/tokenize", {"messages": turns})
            assert response.status_code == status
        assert response.json()["error"]["param"] == "messages"
        assert asked == [LONG + 1]

    with_engine(check)


# --- who answers ---


class Http:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, *messages: Message) -> None:
        self.sent += messages


def test_asking_waits_for_no_answer() -> None:
    let_go, by = threading.Event(), []

    def slowly(question: Any, rendered: Any) -> Any:
        assert let_go.wait(limit(10))
        by.append(threading.current_thread().name)
        return Encoded([[1]], id=question.id)

    http = Http()
    thread = QuestionThread(SimpleNamespace(answer=slowly), http)  # type: ignore[arg-type]
    for i in range(3):
        thread.ask(EncodeReq(texts=["a"], id=i))
    assert not http.sent
    let_go.set()
    thread.close()
    assert http.sent == [Encoded([[1]], id=i) for i in range(3)]
    assert len(set(by)) == 1
    assert threading.current_thread().name not in by


def test_a_text_that_a_tokenizer_fails_on_is_answered() -> None:
    def fails(question: Any, rendered: Any) -> Any:
        raise Exception("a plain one")

    http = Http()
    thread = QuestionThread(SimpleNamespace(answer=fails), http)  # type: ignore[arg-type]
    thread.ask(EncodeReq(texts=["a"], id=1))
    thread.ask(DecodeReq([[1]], id=2))
    thread.close()
    assert http.sent == [Encoded(error=FAILED, id=1), Decoded(error=FAILED, id=2)]


# --- who waits ---


class Client:
    """A client with a body that has been read. ``key``: the name of its API key."""

    def __init__(self, key: str = "") -> None:
        self.scope = {SCOPE_KEY: Caller(key, is_admin=False)}
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Tokenizer:
    """Answers when it is told to."""

    def __init__(self, queue: QuestionQueue) -> None:
        self.queue = queue
        self.asked: list[str] = []
        self.answers: dict[str, asyncio.Future[str]] = {}

    def ask(
        self, name: str, work: int = LONG, client: Client | None = None, *, has_chat: bool = False
    ) -> asyncio.Task[str]:
        def sent() -> asyncio.Future[str]:
            self.asked.append(name)
            future = self.answers[name] = asyncio.get_running_loop().create_future()
            return future

        return asyncio.ensure_future(self.queue.ask(client or Client(), work, sent, has_chat=has_chat))  # type: ignore[arg-type]


def with_queue(check: Callable[[Tokenizer], Any]) -> None:
    async def run() -> None:
        async with asyncio.timeout(limit(10)):
            await check(Tokenizer(QuestionQueue()))

    asyncio.run(run())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_one_long_question_is_asked_at_a_time_and_short_ones_pass() -> None:
    async def check(tokenizer: Tokenizer) -> None:
        tasks = [tokenizer.ask("a"), tokenizer.ask("b"), tokenizer.ask("short", 1)]
        await settle()
        assert tokenizer.asked == ["a", "short"]
        tokenizer.answers["short"].set_result("short")
        tokenizer.answers["a"].set_result("a")
        await settle()
        assert tokenizer.asked == ["a", "short", "b"]
        tokenizer.answers["b"].set_result("b")
        assert await asyncio.gather(*tasks) == ["a", "b", "short"]
        assert (tokenizer.queue.waiting, tokenizer.queue.waiting_work) == (0, 0)

    with_queue(check)


def test_a_question_whose_client_goes_is_not_asked() -> None:
    async def check(tokenizer: Tokenizer) -> None:
        client = Client()
        first, gone, last = tokenizer.ask("a"), tokenizer.ask("gone", client=client), tokenizer.ask("b")
        await settle()
        client.gone.set()
        with pytest.raises(ClientDisconnect):
            await gone
        tokenizer.answers["a"].set_result("a")
        await settle()
        tokenizer.answers["b"].set_result("b")
        await asyncio.gather(first, last)
        assert tokenizer.asked == ["a", "b"]

    with_queue(check)


def test_a_client_that_asks_and_goes_keeps_one_turn() -> None:
    async def check(tokenizer: Tokenizer) -> None:
        task = tokenizer.ask("a")
        await settle()
        task.cancel()
        later = tokenizer.ask("b")
        await settle()
        assert tokenizer.asked == ["a"], "the tokenizer is not done yet"
        tokenizer.answers["a"].set_result("a")
        await settle()
        tokenizer.answers["b"].set_result("b")
        assert await later == "b"

    with_queue(check)


@pytest.mark.parametrize(
    ("count", "work", "most"),
    [(MAX_WAITING // 2, LONG, MAX_WAITING), (8, MAX_WAITING_WORK // 16, MAX_WAITING_WORK)],
)
def test_a_question_too_many_is_a_429_and_another_key_still_has_room(count: int, work: int, most: int) -> None:
    async def check(tokenizer: Tokenizer) -> None:
        tasks = [tokenizer.ask(str(i), work, Client("greedy")) for i in range(count + 1)]
        await settle()
        with pytest.raises(ApiError, match=f"the limit is {most}, of which a key may have") as refused:
            await tokenizer.ask("one more", work, Client("greedy"))
        assert (refused.value.status, refused.value.code) == (429, "key_limit_exceeded")
        tasks.append(tokenizer.ask("other", work, Client("other")))
        await settle()
        assert tokenizer.queue.waiting == count + 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (tokenizer.queue.waiting, tokenizer.queue.waiting_work) == (0, 0)

    with_queue(check)


def test_keys_take_turns() -> None:
    async def check(tokenizer: Tokenizer) -> None:
        tasks = [tokenizer.ask(f"greedy{i}", client=Client("greedy")) for i in range(4)]
        await settle()
        tasks += [tokenizer.ask(f"other{i}", client=Client("other")) for i in range(2)]
        await settle()
        for _ in tasks:
            tokenizer.answers[tokenizer.asked[-1]].set_result("")
            await settle()
        assert tokenizer.asked == ["greedy0", "greedy1", "other0", "greedy2", "other1", "greedy3"]
        await asyncio.gather(*tasks)

    with_queue(check)


def test_questions_with_conversations_hold_up_those_of_their_own_key_alone() -> None:
    async def check(tokenizer: Tokenizer) -> None:
        greedy, gone = Client("greedy"), Client("greedy")
        tasks = [tokenizer.ask(f"greedy{i}", i, greedy, has_chat=True) for i in range(10)]
        last = tokenizer.ask("gone", 1, gone, has_chat=True)
        tasks += [
            tokenizer.ask("chat", 1, Client("other"), has_chat=True),
            tokenizer.ask("long"),
            tokenizer.ask("s", 1),
        ]
        await settle()
        assert tokenizer.asked == ["greedy0", "chat", "long", "s"]
        gone.gone.set()
        with pytest.raises(ClientDisconnect):
            await last
        for name in ("chat", "long", "s", *(f"greedy{i}" for i in range(10))):
            tokenizer.answers[name].set_result(name)
            await settle()
        await asyncio.gather(*tasks)
        assert tokenizer.asked[4:] == [f"greedy{i}" for i in range(1, 10)]
        assert (tokenizer.queue.waiting, tokenizer.queue._chats) == (0, {})

    with_queue(check)


def test_requests_and_health_checks_do_not_wait_for_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = QuestionQueue()
    monkeypatch.setattr("pdserve.server.http.app.QuestionQueue", lambda: queue)

    async def check(engine: FakeEngine) -> None:
        engine.mute = True
        text = "\N{GRINNING FACE}" * (LONG // 8 + 1)
        asking = [asyncio.ensure_future(engine.post("/tokenize", {"prompt": [text] * 8})) for _ in range(5)]
        while queue.waiting < 4 or not engine.questions:
            await asyncio.sleep(0)
        engine.mute = False
        assert (await engine.get("/health")).status_code == 200
        assert (await engine.post("/generate", {"text": "a"})).status_code == 200
        sent = [question for question in engine.questions if isinstance(question, EncodeReq)]
        assert len(sent) == 1
        engine._answer(sent[0])
        assert {response.status_code for response in await asyncio.gather(*asking)} == {200}

    with_engine(check)
