"""The threads that answer questions about text in the tokenizer process: one for texts, one for conversations.

A question may take a large part of a second. The tokenizer library lets other threads run meanwhile. So requests and
health checks wait for a few milliseconds at most, until this thread has built a list of ids. The HTTP process limits
the number of questions that wait here (``http/engine/question_queue.py``).
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from ..messages.channel import SendsMessages
from ..messages.text import Decoded, DecodeReq, Encoded, EncodeReq
from ..messages.too_large import send_or_explain
from ..model_files.text.errors import PromptError
from .text_questions import TextQuestions

logger = logging.getLogger(__name__)
FAILED = "the tokenizer failed on this question; the server's log says why"


class QuestionThread:
    """Answers questions one after the other. ``http`` is used by this thread alone, as every ZMQ socket."""

    def __init__(self, questions: TextQuestions, http: SendsMessages) -> None:
        self._questions = questions
        self._http = http
        self._thread = ThreadPoolExecutor(1, "text-questions")

    def ask(self, question: EncodeReq | DecodeReq, rendered: str | PromptError | None = None) -> None:
        """Queue a question for the thread, which sends the answer to the HTTP process. Return at once.

        Any thread may call this. ``rendered``: the question's conversation as the chat template renders it, or why it
        is refused. None for texts.
        """
        self._thread.submit(self._answer, question, rendered)

    def close(self) -> None:
        """Wait until every queued question is answered, and end the thread."""
        self._thread.shutdown()

    def _answer(self, question: EncodeReq | DecodeReq, rendered: str | PromptError | None) -> None:
        try:
            answer = self._questions.answer(question, rendered)
        except Exception:  # the tokenizer library raises plain ones, and no text may end the instance
            logger.exception("a question about text failed")
            kind = Encoded if isinstance(question, EncodeReq) else Decoded
            answer = kind(error=FAILED, id=question.id)
        send_or_explain(self._http, [answer])
