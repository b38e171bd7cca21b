"""The tokenizer process: HTTP → here → scheduler.

A ``TokenizeReq`` becomes a ``GenerateReq`` for the scheduler, or a ``ForkedReq`` if it has several answers. A bad one
becomes a ``ReqError`` for each of its answers, which goes straight back to HTTP.

Conversations are rendered, and questions about text answered, on threads of their own. All other messages pass to the
scheduler unchanged and in order, so that an abort never overtakes the request that it ends.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..messages.base import Message
from ..messages.channel import FrameTooLarge, Receiver, Sender, SendsMessages
from ..messages.decode import shown
from ..messages.outputs import ReqError
from ..messages.requests import ForkedReq, GenerateReq, TokenizeReq
from ..messages.routes import ToTokenizer
from ..messages.text import DecodeReq, EncodeReq, LimitsReq
from ..messages.too_large import send_or_explain, stand_ins
from ..model_files.errors import ModelError
from ..model_files.grammar.limited_check import LimitedCheck
from ..model_files.grammar.vocabulary import why_no_grammars
from ..model_files.model_limits import read_limits
from ..model_files.model_path import resolve_model
from ..model_files.text.errors import TextError
from ..model_files.text.limited_template import LimitedTemplate
from ..model_files.text.load import find_chat_template, load_tokenizer
from ..model_files.text.named_templates import NamedTemplates
from ..model_files.text.text_tokenizer import TextTokenizer
from ..runtime.child import start_child
from ..runtime.malloc import return_freed_memory, trim
from .chat_renderer import ChatRenderer, Exits, Rendered
from .options import ServerOptions
from .prompt_encoder import MissingTemplate
from .question_thread import QuestionThread
from .request_tokenizer import NO_GRAMMARS, NOTHING_RENDERED, ChecksGrammars, NoGrammars, RequestTokenizer
from .tokenizer_inbox import TokenizerInbox

logger = logging.getLogger(__name__)
OPTIONS = ServerOptions


class TokenizerOutput(NamedTuple):
    """What one round of messages gave, for each receiver."""

    to_scheduler: list[Message]
    to_http: list[Message]
    questions: list[EncodeReq | DecodeReq]


def load_request_tokenizer(options: ServerOptions) -> RequestTokenizer:
    """Load the tokenizer, the chat templates and the model's limits. Return what turns requests into token ids.

    Starts the template's process. Raises ``TokenizerLoadError`` or ``ModelError``.
    """
    source = resolve_model(options.model_path, revision=options.revision, weights=False)
    limits = read_limits(source, options.context_length, options.model_impl)
    process = LimitedTemplate()  # it starts meanwhile
    tokenizer = load_tokenizer(options)
    tokenizer.encode_batch(["a"], add_special_tokens=True)  # what is loaded on first use is loaded now
    template = _load_template(process, find_chat_template(options, tokenizer), tokenizer.special_tokens)
    grammars = choose_grammar_checks(options, tokenizer, limits.vocab_size)
    return RequestTokenizer(tokenizer, template, limits, options.max_logprobs_per_request, grammars)


def choose_grammar_checks(options: ServerOptions, tokenizer: TextTokenizer, vocab_size: int) -> ChecksGrammars:
    """Return the object that checks grammars for this model. If the server can't use grammars, it refuses every one."""
    if options.grammar_backend == "none":
        return NO_GRAMMARS
    reason = why_no_grammars(tokenizer, vocab_size)
    return NoGrammars(reason) if reason else LimitedCheck()


def _load_template(
    process: LimitedTemplate, sources: NamedTemplates | None, special_tokens: Mapping[str, str]
) -> LimitedTemplate | MissingTemplate:
    """Load the chat templates into ``process``, where they are rendered. Without any, end it. Return the renderer.

    Raises ``TokenizerLoadError``.
    """
    if sources is None:
        process.close()
        return MissingTemplate()
    process.load(sources, special_tokens)
    return process


def route(
    tokenizer: RequestTokenizer, messages: Sequence[ToTokenizer], rendered: Mapping[str, Rendered] = NOTHING_RENDERED
) -> TokenizerOutput:
    """Tokenize the requests among ``messages``, and return all messages by their receiver, in order. Send nothing.

    ``rendered``: conversations as text, or why they are refused, by rid. Refused requests become errors for HTTP.
    """
    answers = iter(tokenizer.tokenize([m for m in messages if isinstance(m, TokenizeReq)], rendered))
    routed = TokenizerOutput([], [], [])
    for message in messages:
        if isinstance(message, TokenizeReq):
            _route_request(routed, message, next(answers))
        elif isinstance(message, EncodeReq | DecodeReq):
            routed.questions.append(message)
        elif isinstance(message, LimitsReq):
            routed.to_http.append(tokenizer.questions.answer(message))
        else:
            routed.to_scheduler.append(message)
    return routed


def _route_request(routed: TokenizerOutput, req: TokenizeReq, answer: GenerateReq | ReqError) -> None:
    if isinstance(answer, ReqError):
        logger.debug("refused: %s", shown(answer.message), extra={"rid": req.rid})
        routed.to_http.extend(msgspec.structs.replace(answer, rid=rid) for rid in req.rids)
        return
    logger.debug("%d prompt tokens", answer.prompt_len, extra={"rid": req.rid})
    routed.to_scheduler.append(ForkedReq(answer, req.forks) if req.forks else answer)


def deliver(routed: TokenizerOutput, scheduler: SendsMessages, http: SendsMessages) -> None:
    """Send the messages that ``route`` returned to the scheduler and to HTTP.

    A message too large for a frame is not sent: HTTP gets an error for its requests instead.
    """
    try:
        scheduler.send(*routed.to_scheduler)
    except FrameTooLarge as e:
        logger.error("%s", e)
        too_large = set(map(id, e.messages))
        scheduler.send(*(message for message in routed.to_scheduler if id(message) not in too_large))
        for message in e.messages:
            routed.to_http.extend(stand_ins(message, e))
    send_or_explain(http, routed.to_http)


def main() -> None:
    """Run the tokenizer process of an instance until it is killed.

    Exits with an error if the tokenizer can't be loaded.
    """
    started = time.monotonic()
    ctx = start_child(sys.argv, OPTIONS)
    return_freed_memory()
    here = ctx.options.disaggregation_mode
    inbox = TokenizerInbox(Receiver(ctx.zmq_ctx, ctx.address("tokenizer"), ToTokenizer), here)
    scheduler = Sender(ctx.zmq_ctx, ctx.address("scheduler"))
    http = Sender(ctx.zmq_ctx, ctx.address("http"))
    try:
        tokenizer = load_request_tokenizer(ctx.options)
    except (TextError, ModelError) as e:
        sys.exit(f"tokenizer: {e}")
    trim()
    thread = QuestionThread(tokenizer.questions, Sender(ctx.zmq_ctx, ctx.address("http")))
    with_chats = QuestionThread(tokenizer.questions, Sender(ctx.zmq_ctx, ctx.address("http")))
    renderer = ChatRenderer(
        tokenizer.render,
        tokenizer.check_grammar,
        Exits(Sender(ctx.zmq_ctx, ctx.address("tokenizer")), Sender(ctx.zmq_ctx, ctx.address("http")), with_chats),
        2 * ctx.options.max_queued_requests,
        here,
    )
    ctx.report_ready({"load_tokenizer": time.monotonic() - started})
    while True:
        arrived = inbox.next_tick()
        turn = renderer.sort(arrived.messages)
        routed = route(tokenizer, turn.messages, turn.texts)
        routed.to_http.extend(arrived.ended + turn.answers)
        for question in routed.questions:
            if isinstance(question, EncodeReq) and question.chat is not None:
                renderer.ask(question)
            else:
                thread.ask(question)
        deliver(routed, scheduler, http)


if __name__ == "__main__":
    main()
