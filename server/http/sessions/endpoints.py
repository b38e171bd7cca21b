"""Sessions: requests that are saved and go on later, here or at another instance that has the folder, too.

A session's state comes from the scheduler (``messages/sessions.py``), and is written to a file of its owner's
(``session_files.py``). Its KV lies in the store of the tiers, under the hashes of the tokens. So a file does not
mention pages. When the request goes on, its pages are looked up in the store, and the rest is computed.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ....messages.base import unpack_i32
from ....messages.sampling import SamplingParams
from ....messages.sessions import SessionState, SnapshotReq
from ....runtime.web.access_log import CLIENT_GONE, AccessRecord
from ....runtime.web.keys import NAME as KEY_NAME
from ....runtime.web.keys import Caller
from ..answers import respond
from ..endpoint import QueryParameter, endpoint
from ..engine.plan import Prompt, PromptPlan, sampling_params
from ..engine.question_client import QuestionRefused
from ..engine.submission import Choice, Submission
from ..errors import ApiError, ClientGone, bad_request
from ..generation.engine_response import EngineResponse, watch_disconnect
from ..generation.tickets import can_follow
from ..native.answers import Generated
from ..native.generate import SAMPLING_NAMES, NativeRenderer
from ..openai.conversation import read_conversation
from ..parsing import parse_body
from ..session_store.session_files import Listed, Session, SessionInfo
from ..state import HttpState
from .schemas import Deleted, RestoreAnswer, RestoreBody, SessionEntry, SessionList, SnapshotAnswer, SnapshotBody

SNAPSHOT_SECONDS = 30.0
"""Timeout of the scheduler's answer, which waits for the store no longer than ``scheduler/kept_pages.py`` says."""


# --- saving ---


@endpoint(SnapshotAnswer, body=SnapshotBody)
async def snapshot(request: Request) -> Response:
    """Save a running or just ended request, or a prompt once it is computed, as a session that can go on later.

    Answers when the KV is in the store, or can't be.
    """
    state = HttpState.of(request)
    files = state.sessions.files
    body = await parse_body(request, SnapshotBody)
    ttl = min(body.ttl_s or files.limits.ttl, files.limits.ttl)
    if body.rid is not None:
        info, nbytes, kv = await save_request(request, body.name, body.rid, ttl)
    else:
        info, nbytes, kv = await _save_prompt(request, body, ttl)
    shown = {name: getattr(info, name) for name in SnapshotAnswer.model_fields if name in SessionInfo.__struct_fields__}
    return respond(SnapshotAnswer(**shown, bytes=nbytes, kv=kv))


async def save_request(request: Request, name: str, rid: str, ttl: float) -> tuple[SessionInfo, int, str]:
    """Save the request that the caller calls ``rid`` as the session ``name``, to be kept for ``ttl`` seconds.

    Return the session's facts, the size of its file in bytes, and "stored" or why not all of its KV is in the store.
    Raises ``ApiError``.
    """
    wire_rids = HttpState.of(request).engine.live.known(rid, Caller.of(request.scope))
    if not wire_rids:
        raise ApiError(404, f'rid: no request "{rid}" of yours runs here, or has ended lately', param="rid")
    if len(wire_rids) > 1:
        raise bad_request("rid", f'"{rid}" has {len(wire_rids)} answers; name one of them, like "{rid}-0"')
    return await _write_down(request, name, wire_rids[0], ttl, with_output=True)


async def _save_prompt(request: Request, body: SnapshotBody, ttl: float) -> tuple[SessionInfo, int, str]:
    state, caller = HttpState.of(request), Caller.of(request.scope)
    submission = await state.engine.submit([_plan(request, body)], streaming=True, caller=caller, keeps_sent=False)
    try:
        async with watch_disconnect(request.receive, submission):
            await submission.deltas()  # the first token shows that the prompt is computed
            return await _write_down(request, body.name, submission.choices[0].wire_rid, ttl, with_output=False)
    except ApiError as e:
        sent = next(name for name in ("messages", "text", "input_ids") if getattr(body, name) is not None)
        raise e.renamed({"text": sent, "input_ids": sent, **SAMPLING_NAMES}) from None
    except ClientGone:
        raise ApiError(CLIENT_GONE, "the client has gone") from None
    finally:
        state.engine.end(submission)
        submission.close()


def _plan(request: Request, body: SnapshotBody) -> PromptPlan:
    state, s = HttpState.of(request), body.sampling_params
    prompt = Prompt(text=body.text, input_ids=body.input_ids)
    if body.messages is not None:
        args = body.chat_template_kwargs
        prompt = Prompt(chat=read_conversation(body.messages, body.add_generation_prompt, False, args))
    return PromptPlan(
        prompt=prompt,
        sampling=sampling_params(s, s.max_new_tokens, s.min_new_tokens, s.sampling_seed, state.model.defaults),
        n=1,
        rid=_free_name(request, "snapshot-"),
        keep_output=True,
        logprobs=None,
        bootstrap=None,
        extra_key=body.extra_key,
    )


def _free_name(request: Request, prefix: str) -> str:
    rid = prefix + AccessRecord.of(request.scope).request_id
    is_taken = HttpState.of(request).engine.live.is_named(rid, Caller.of(request.scope))
    return f"{rid}-{secrets.token_hex(4)}" if is_taken else rid


async def _write_down(
    request: Request, name: str, wire_rid: str, ttl: float, *, with_output: bool
) -> tuple[SessionInfo, int, str]:
    http, caller, now = HttpState.of(request), Caller.of(request.scope), time.time()
    owner, key_name = caller.name, None if caller.is_admin else caller.name
    try:
        question = SnapshotReq(wire_rid, with_output, now + ttl, key_name)
        result = await http.engine.questions.ask(question, SNAPSHOT_SECONDS)
    except QuestionRefused as e:
        if e.status == 503:  # it still loads
            raise ApiError(503, f"{e.message}; try again in a few seconds") from None
        raise
    state = result.state
    info = SessionInfo(
        name=name,
        owner=owner,
        created=round(now, 3),
        expires=round(now + ttl, 3),
        model=http.model.name,
        prompt_tokens=state.running.request.prompt_len,
        output_tokens=state.output_len,
        kv_tokens=result.kv_tokens,
        kv_bytes=result.kv_bytes,
    )
    older = await http.sessions.run(lambda files: files.find(owner, name))
    try:
        nbytes = await http.sessions.run(lambda files: files.save(info, state))
    except ApiError:
        _release(http, Session(info, state), older)
        raise
    if older is not None:
        _release(http, older, Session(info, state))
    return info, nbytes, result.message or "stored"


def _release(http: HttpState, session: Session, other: Session | None = None) -> None:
    """Tell the scheduler that the store need not keep a session's KV, except the beginning shared with ``other``."""
    if not session.info.kv_tokens:
        return
    token_ids, key = session.state.token_ids[: 4 * session.info.kv_tokens], session.state.running.request.extra_key
    shared = 0
    if other is not None and other.state.running.request.extra_key == key:
        a, b = unpack_i32(token_ids), unpack_i32(other.state.token_ids[: 4 * other.info.kv_tokens])
        length = min(len(a), len(b))
        differ = (a[:length] != b[:length]).nonzero()[0]
        shared = int(differ[0]) if len(differ) else length
    http.engine.release(token_ids, key, shared)


# --- going on ---


@endpoint(RestoreAnswer, body=RestoreBody, event=Generated)
async def restore(request: Request) -> Response:
    """Resume the answer of a session, or only bring back its KV for the next request with its tokens."""
    http, body = HttpState.of(request), await parse_body(request, RestoreBody)
    owner = _owner(request, body.owner)
    session = await http.sessions.run(lambda files: files.load(owner, body.name))
    state = session.state
    resume = (state.is_open and state.output_len > 0) if body.resume is None else body.resume
    if not resume:
        return respond(await _restored(request, owner, session, body))
    rid = body.rid or _free_name(request, "restore-")
    return ResumedResponse(http, _named(state, rid), owner, stream=body.stream, incremental=body.incremental)


async def _restored(request: Request, owner: str, session: Session, body: RestoreBody) -> RestoreAnswer:
    choice = await bring_back(request, owner, session.state)
    token_ids = unpack_i32(session.state.token_ids)
    cached = choice.cached_tokens or 0
    answer = RestoreAnswer(
        name=session.info.name,
        tokens=len(token_ids),
        cached_tokens=cached,
        computed_tokens=(choice.prompt_tokens or 0) - cached,
        resumable=session.state.is_open,
    )
    if body.return_token_ids:
        answer.token_ids = token_ids.tolist()
    return answer


async def bring_back(request: Request, owner: str, state: SessionState) -> Choice:
    """Have the KV of a session's tokens found in the store or computed, and wait until requests find it cached.

    The last token's is left out: continuing the request computes it. Return the choice, which counts the cached tokens.
    Raises ``ApiError``.
    """
    engine, token_ids, msg = HttpState.of(request).engine, state.token_ids, state.running.request
    msg = msgspec.structs.replace(
        msg,
        rid=_free_name(request, "restore-"),
        input_ids=token_ids[:-4] or token_ids,
        sampling=SamplingParams(seed=0, max_new_tokens=1, temperature=0.0),
        stop_ids=(),
        logprobs=None,
        return_prompt=False,
        timeout_s=0.0,  # that limit was for its answer
    )
    running = msgspec.structs.replace(state.running, request=msg, output=b"", max_new_tokens=1)
    whole = msgspec.structs.replace(state, running=running, logprobs=[], input_logprobs=None)
    submission = engine.resume(whole, owner, streaming=False, caller=Caller.of(request.scope))
    try:
        async with watch_disconnect(request.receive, submission):
            [choice] = await submission.finished()
            return choice
    except ClientGone:
        raise ApiError(CLIENT_GONE, "the client has gone") from None
    finally:
        engine.end(submission)
        submission.close()


def _named(state: SessionState, rid: str) -> SessionState:
    request = msgspec.structs.replace(state.running.request, rid=rid)
    return msgspec.structs.replace(state, running=msgspec.structs.replace(state.running, request=request))


class ResumedResponse(EngineResponse):
    """The answer of a session from its first token on, in the shape of ``POST /generate``."""

    def __init__(
        self, http: HttpState, state: SessionState, owner: str, *, stream: bool, incremental: bool | None
    ) -> None:
        msg = state.running.request
        plan = PromptPlan(Prompt(), msg.sampling, 1, msg.rid, True, msg.logprobs, None, "")
        by_default = http.options.incremental_streaming_output
        renderer = NativeRenderer(
            [plan],
            as_list=False,
            incremental=by_default if incremental is None else incremental,
            prompt_ids=msg.return_prompt,
            prompt_lens=[msg.prompt_len],
        )
        super().__init__(http.engine, [plan], renderer, stream=stream)
        self._state = state
        self._owner = owner

    async def _submission(self, scope: Scope) -> Submission:
        caller, follows = Caller.of(scope), can_follow(scope)
        return self._engine.resume(
            self._state,
            self._owner,
            streaming=self._is_stream,
            caller=caller,
            follows=follows,
            keeps_sent=self._keeps_sent,
        )


# --- listing and deleting ---


@endpoint(SessionList)
async def list_sessions(request: Request) -> Response:
    """List the sessions of the caller. For an admin, list all sessions with their owners."""
    caller = Caller.of(request.scope)
    found = await HttpState.of(request).sessions.run(
        lambda files: files.listed(None if caller.is_admin else caller.name)
    )
    return respond(SessionList(sessions=[_entry(listed, with_owner=caller.is_admin) for listed in found]))


def _entry(listed: Listed, *, with_owner: bool) -> SessionEntry:
    shown: dict[str, Any] = {"name": listed.name, "owner": listed.owner, "damaged": True}
    if listed.info is not None:
        shown = msgspec.structs.asdict(listed.info)
    if not with_owner:
        del shown["owner"]
    return SessionEntry(**shown, bytes=listed.nbytes)


@endpoint(Deleted, query=(QueryParameter("owner"),))
async def delete_session(request: Request) -> Response:
    """Delete a session; the store may then drop its KV."""
    name = request.path_params["name"]
    await remove(request, _owner(request, request.query_params.get("owner")), name)
    return respond(Deleted(deleted=name))


async def remove(request: Request, owner: str, name: str) -> Session | None:
    """Delete the session ``name`` of ``owner`` and return it; its KV need no longer be stored.

    Return None for a damaged one, of which the KV is not known. Raises ``ApiError`` 404 if there is none.
    """
    http = HttpState.of(request)
    session = await http.sessions.run(lambda files: files.remove(owner, name))
    if session is not None:
        _release(http, session)
    return session


def _owner(request: Request, named: str | None) -> str:
    caller = Caller.of(request.scope)
    if named is None or named == caller.name:
        return caller.name
    if not caller.is_admin:
        raise ApiError(403, "owner: only the admin means other owners' sessions; leave it out", param="owner")
    if named and not KEY_NAME.fullmatch(named):
        raise bad_request(
            "owner", "is no key's name: these have up to 64 letters, digits, dots, dashes and underscores"
        )
    return named
