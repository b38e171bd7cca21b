"""Renders conversations on a thread of its own, so that a template holds up nothing but conversations.

    TokenizeReq ──▶ waits ──▶ is rendered ──ChatRendered──▶ passed on, with its text
                ├── with a grammar: waits ──▶ is checked ──▶ waits …
                ├── too many wait: 429
                └── all its answers are aborted: ended here
    EncodeReq ──▶ waits ──▶ is rendered ──▶ thread that encodes and answers it

Grammars are checked on another thread: a bad one may take half a second of a processor, and conversations without one
go on. API keys take turns, and none can fill the queue. Messages that name a request which is here are held, and follow
it: an abort must never overtake the request that it ends.

The tokenizer's loop calls ``sort`` and ``ask``. To wake the loop up, the thread sends a ``ChatRendered`` on the loop's
own channel. If it can't, it answers the request itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from ..messages.base import Message
from ..messages.channel import SendsMessages
from ..messages.outputs import InstanceRole, ReqError
from ..messages.requests import AbortReq, ChatRendered, TokenizeReq
from ..messages.routes import ToTokenizer
from ..messages.text import EncodeReq
from ..model_files.text.errors import PromptError
from ..runtime.key_queue import KeyQueue
from .aborted_request import end_of_aborted
from .key_shares import KeyShares

logger = logging.getLogger(__name__)
FAILED = "the tokenizer failed on this conversation; the server's log says why"
QUESTIONS_OF = "\0"
"""Precedes the key's name in the queue's name of its questions. No name of a key contains it."""
Rendered = str | PromptError
"""A conversation as the model's template renders it, or why its request is refused."""


class Sorted(NamedTuple):
    """What to do with a turn's messages."""

    messages: list[ToTokenizer]
    """What to handle now, in this order."""
    texts: dict[str, Rendered]
    """The conversations among them, rendered, by rid."""
    answers: list[Message]
    """What to tell HTTP of requests that ended here."""


@dataclass(eq=False)
class _Chat:
    """A request with a conversation to be rendered."""

    req: TokenizeReq
    waits_in: KeyQueue[Any] | None = None
    """The queue that it waits in; None: a thread has taken it. Guarded by the lock."""
    refusal: PromptError | None = None
    """Why its grammar cannot be used. Set before it is rendered."""
    rendered: Rendered = ""
    """Set by the thread before it sends ``ChatRendered``."""
    held: list[ToTokenizer] = field(default_factory=list)
    """Messages that name one of its answers, in the order of their arrival."""
    aborts: dict[str, str] = field(default_factory=dict)
    """Reasons by the rid of each answer that is aborted."""

    @property
    def is_aborted(self) -> bool:
        """Whether all answers of the request are aborted."""
        return len(self.aborts) == len(self.req.rids)


class AsksWithText(Protocol):
    """The thread that answers questions with conversations; ``QuestionThread`` is one."""

    def ask(self, question: EncodeReq, rendered: Rendered) -> None:
        """Queue a question for another thread, which sends the answer to the HTTP process. Return at once.

        ``rendered``: the question's conversation as text, or the reason to refuse it.
        """


class Exits(NamedTuple):
    """Where the renderer's thread sends what it has rendered. It alone uses the channels."""

    loop: SendsMessages
    """The loop's own channel."""
    http: SendsMessages
    questions: AsksWithText


class ChatRenderer:
    """Requests with conversations, from their arrival until they are rendered. Their rids are unique.

    ``render`` and ``check`` run on threads. ``check`` returns why a request's grammar is refused. ``most_waiting``:
    maximum number of requests here, half of them of one API key. ``here``: see ``Timing``.
    """

    def __init__(
        self,
        render: Callable[[TokenizeReq | EncodeReq], Rendered],
        check: Callable[[TokenizeReq], PromptError | None],
        exits: Exits,
        most_waiting: int,
        here: InstanceRole,
    ) -> None:
        self._render = render
        self._check = check
        self._exits = exits
        self._here = here
        self._chats: dict[str, _Chat] = {}
        """Requests that are here, by the rid of each of their answers."""
        self._shares = KeyShares(most_waiting)
        self._lock = threading.Lock()
        self._waiting: KeyQueue[_Chat | EncodeReq] = KeyQueue()
        """Requests and questions that the thread has not taken. Guarded by the lock."""
        self._answered: list[_Chat] = []
        """Requests that the thread has answered, because it could not wake the loop up. Guarded by the lock."""
        self._unchecked: KeyQueue[_Chat] = KeyQueue()
        """Requests with a grammar that is to be checked. Guarded by the lock."""
        self._checker = ThreadPoolExecutor(1, "grammar-checker")
        self._thread = ThreadPoolExecutor(1, "chat-renderer")
        # The threads start now, where a failure is seen.
        self._checker.submit(int)
        self._thread.submit(int)

    def sort(self, messages: Sequence[ToTokenizer]) -> Sorted:
        """Queue the requests that need rendering or a grammar check; return all that is to be handled now. Never block.

        The result has the other messages in order, and the requests that are rendered by now. A message that names a
        queued request is held until the request is rendered. Requests over the limit get a 429.
        """
        out = Sorted([], {}, [])
        self._forget_answered(out)
        for message in messages:
            if isinstance(message, TokenizeReq) and (message.chat is not None or message.sampling.grammar is not None):
                self._take(message, out)
            elif isinstance(message, ChatRendered):
                self._pass_on(self._chats[message.rid], out)
            elif isinstance(message, AbortReq) and not message.rid:
                out.messages.append(message)
                for rid in list(self._chats):
                    self._hold(AbortReq(rid, message.reason), out)
            elif getattr(message, "rid", None) in self._chats:
                self._hold(message, out)
            else:
                out.messages.append(message)
        return out

    def ask(self, question: EncodeReq) -> None:
        """Queue a question: threads render its conversation, then send the answer to the HTTP process. Return at once.

        An API key's questions take turns with all other keys, apart from the key's requests. Their client waits, and
        sends one at a time.
        """
        with self._lock:
            self._waiting.append(QUESTIONS_OF + question.key_name, question)
        self._thread.submit(self._render_next)

    def close(self) -> None:
        """Wait until every queued conversation is rendered, and end both threads."""
        self._checker.shutdown()
        self._thread.shutdown()

    def _take(self, req: TokenizeReq, out: Sorted) -> None:
        shares, key = self._shares, req.key_name
        if not shares.has_room(key, 1):
            text = (
                f"{shares.of(key)} conversations of this API key wait for the chat template, {shares.held} of all "
                f"keys; the limit is {shares.most} (twice --max-queued-requests), of which a key may have as many as "
                "it leaves free; try again later"
            )
            code = shares.refusal_code(key, 1)
            refusal = ReqError(req.rid, 429, text, "overloaded_error", code=code, retry_after=1)
            out.answers.extend(msgspec.structs.replace(refusal, rid=rid) for rid in req.rids)
            return
        shares.take(key, 1)
        chat = _Chat(req)
        self._chats.update(dict.fromkeys(req.rids, chat))
        if req.sampling.grammar is None:
            self._wait_for_template(chat)
        else:
            with self._lock:
                self._wait_in(self._unchecked, chat)
            self._checker.submit(self._check_next)

    def _wait_for_template(self, chat: _Chat) -> None:
        with self._lock:
            self._wait_in(self._waiting, chat)
        self._thread.submit(self._render_next)

    @staticmethod
    def _wait_in(queue: KeyQueue[Any], chat: _Chat) -> None:
        queue.append(chat.req.key_name, chat)
        chat.waits_in = queue

    def _hold(self, message: ToTokenizer, out: Sorted) -> None:
        """Hold a message back until the request that it names is rendered.

        If it is the abort of the last answer, and no thread has taken the request, end the request at once.
        """
        chat = self._chats.get(getattr(message, "rid", ""))
        if chat is None:
            return  # of an abort of all, which has ended it with another of its answers
        if isinstance(message, AbortReq):
            if message.rid in chat.aborts:
                return  # a client that repeats itself
            chat.aborts[message.rid] = message.reason
        chat.held.append(message)
        if chat.is_aborted and self._withdraw(chat):
            self._end(chat, out)

    def _end(self, chat: _Chat, out: Sorted) -> None:
        """End a request with all answers aborted, and tell the HTTP process so.

        Pass on other messages that name it.
        """
        self._forget(chat)
        out.answers.append(end_of_aborted(chat.req, chat.aborts, self._here))
        out.messages.extend(message for message in chat.held if not isinstance(message, AbortReq))

    def _withdraw(self, chat: _Chat) -> bool:
        """Remove a request from the queue that it waits in. Return False if a thread has taken it already."""
        with self._lock:
            queue, chat.waits_in = chat.waits_in, None
            if queue is not None:
                queue.remove(chat.req.key_name, chat)
            return queue is not None

    def _pass_on(self, chat: _Chat, out: Sorted) -> None:
        if chat.is_aborted:
            # Encoding costs many times what rendering does, and the client's share was given back.
            self._end(chat, out)
            return
        self._forget(chat)
        out.messages.append(chat.req)
        out.texts[chat.req.rid] = chat.rendered
        out.messages.extend(chat.held)

    def _forget_answered(self, out: Sorted) -> None:
        with self._lock:
            answered, self._answered = self._answered, []
        for chat in answered:
            self._forget(chat)
            out.messages.extend(message for message in chat.held if not isinstance(message, AbortReq))

    def _forget(self, chat: _Chat) -> None:
        for rid in chat.req.rids:
            del self._chats[rid]
        self._shares.give_back(chat.req.key_name, 1)

    # --- on the thread that checks grammars ---

    def _check_next(self) -> None:
        with self._lock:
            if not self._unchecked:
                return  # one was withdrawn
            taken = self._unchecked.pop()
            taken.waits_in = None
        try:
            taken.refusal = self._check(taken.req)
        except Exception:  # no grammar may stop this thread
            logger.exception("a grammar can't be checked", extra={"rid": taken.req.rid})
            taken.refusal = PromptError("grammar", FAILED)
        self._wait_for_template(taken)

    # --- on the thread that renders ---

    def _render_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # one was withdrawn
            taken = self._waiting.pop()
            if isinstance(taken, _Chat):
                taken.waits_in = None
        if isinstance(taken, _Chat):
            taken.rendered = taken.refusal or self._rendered(taken.req)
            self._announce(taken)
        else:
            self._exits.questions.ask(taken, self._rendered(taken))

    def _rendered(self, req: TokenizeReq | EncodeReq) -> Rendered:
        try:
            return self._render(req)
        except Exception:  # the tokenizer library raises plain ones, and no conversation may stop this thread
            logger.exception("a conversation can't be rendered", extra={"rid": getattr(req, "rid", "")})
            return PromptError("messages", FAILED)

    def _announce(self, chat: _Chat) -> None:
        """Send ``ChatRendered`` to the tokenizer's loop, which then passes the rendered request on.

        If sending fails, answer the request with an error: the loop might never look.
        """
        size = len(chat.rendered) if isinstance(chat.rendered, str) else 0
        try:
            self._exits.loop.send(ChatRendered(chat.req.rid, size))
        except Exception:  # whatever it is, the client waits
            logger.exception("the tokenizer's loop can't be woken up", extra={"rid": chat.req.rid})
            with self._lock:
                self._answered.append(chat)
            self._exits.http.send(*(ReqError(rid, 500, FAILED, "server_error") for rid in chat.req.rids))
