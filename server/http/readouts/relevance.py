"""Relevance of a document to a query: how probable "yes" is, beside "no", as the model's next token.

The chat template renders one user's turn with a question, the query and the document. The score is
P(yes) / (P(yes) + P(no)), where each P is the probability of the word's first token at the prompt's end.
"""

from __future__ import annotations

import numpy as np
from starlette.requests import Request

from ....messages.conversation import ChatMessage, Conversation
from ....messages.packed_text import pack
from ....messages.readout import Readout
from ....messages.text import EncodeReq
from ....runtime.web.keys import Caller
from ..engine.plan import Prompt
from ..engine.submission import Choice
from ..errors import bad_request
from ..state import HttpState
from .vectors import vector_of

TIMEOUT_SECONDS = 30.0
"""Timeout of the tokenizer's answer, from when it is asked."""
WORDS = ["yes", "no"]
QUESTION = "Does the document answer the query?"
FIELD_NAMES = {"messages": "documents", "text": "documents", "input_ids": "documents"}


def pair_prompt(query: str, document: str, instruction: str | None) -> Prompt:
    """Return the prompt that asks the model whether ``document`` suits ``query``.

    ``instruction``: question in place of ``QUESTION``.
    """
    text = f'{instruction or QUESTION} Reply with "yes" or "no".\n\nQuery: {query}\n\nDocument: {document}'
    # Templates without this variable ignore it.
    turns = [ChatMessage("user", pack(text))]
    return Prompt(chat=Conversation(turns, template_args={"enable_thinking": False}))


async def yes_and_no(request: Request) -> Readout:
    """Return the readout of the first tokens of "yes" and "no". Raises ``ApiError`` if the model can't tell them."""
    state = HttpState.of(request)
    question = EncodeReq(WORDS, add_special_tokens=False, key_name=Caller.of(request.scope).name)
    ask = lambda: state.engine.questions.ask(question, TIMEOUT_SECONDS)  # noqa: E731
    result = await state.questions.ask(request, sum(map(len, WORDS)), ask)
    labels = tuple(ids[0] for ids in result.token_ids if ids)
    if len(set(labels)) != len(WORDS):
        raise bad_request(None, 'this model has no tokens for "yes" and "no"; use /v1/score with label_token_ids')
    return Readout("labels", labels)


def relevance(choice: Choice) -> float:
    """Return the score of a finished choice, from 0 to 1. Raises ``ApiError``."""
    yes, no = vector_of(choice).astype(np.float64).tolist()
    return float(1.0 / (1.0 + np.exp(min(no - yes, 700.0))))
