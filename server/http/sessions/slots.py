"""llama-server's ``POST /slots/{id}?action=save|restore|erase``: the sessions of ``sessions.py`` under its names.

There are no slots here: ``id`` is the ``rid`` of the request that is saved. A file name is a session's name.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from ....runtime.web.keys import Caller
from ..answers import respond
from ..endpoint import QueryParameter, endpoint
from ..errors import bad_request
from ..parsing import parse_body
from ..state import HttpState
from .endpoints import bring_back, remove, save_request
from .schemas import SlotAnswer, SlotBody

SLOT_DIGITS = 9
ACTIONS = ("save", "restore", "erase")


@endpoint(SlotAnswer, body=SlotBody, query=(QueryParameter("action", ACTIONS, required=True),))
async def slot_action(request: Request) -> Response:
    """Save the request ``id`` as a session file, bring the KV of a session back, or delete a session."""
    sessions, action = HttpState.of(request).sessions, request.query_params.get("action")
    slot, began = request.path_params["id"], time.monotonic()
    if action not in ACTIONS:
        raise bad_request("action", "is save, restore or erase: POST /slots/ID?action=save")
    ttl = sessions.files.limits.ttl
    name = (await parse_body(request, SlotBody)).filename
    # Clients that send a number expect one back. A long one is no slot, and exceeds JSON's precise range.
    is_number = len(slot) <= SLOT_DIGITS and slot.isascii() and slot.isdecimal()
    answer = SlotAnswer(id_slot=int(slot) if is_number else slot)
    owner = Caller.of(request.scope).name
    if action == "save":
        info, nbytes, _ = await save_request(request, name, slot, ttl)
        answer.n_saved, answer.n_written = info.prompt_tokens + info.output_tokens, nbytes + info.kv_bytes
    elif action == "restore":
        session = await sessions.run(lambda files: files.load(owner, name))
        choice = await bring_back(request, owner, session.state)
        answer.n_restored, answer.n_read = choice.cached_tokens or 0, session.info.kv_bytes
    else:
        erased = await remove(request, owner, name)
        answer.n_erased = len(erased.state.token_ids) // 4 if erased is not None else 0
        return respond(answer)
    answer.filename = name
    answer.timings = {f"{action}_ms": round((time.monotonic() - began) * 1000, 3)}
    return respond(answer)
