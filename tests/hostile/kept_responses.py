"""Attacks on kept responses: ids of another key, conversations that multiply, a full store, and running responses."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from .neighbour import Neighbour
from .sender import Answer, Reads, Sender, read_all, read_none
from .sound import RESPONSE_ID, Known
from .watch import Record

PATH = "/v1/responses"
FILLED_BYTES, FILLED_PIECE = 80_000_000, 8_000_000
"""Bytes that fill the store of one key (``--responses-quota``: 64 MB), and those of one request."""
CHAIN = 6
"""Responses of one conversation."""


def ballast(size: int) -> dict[str, Any]:
    """Return an item that is kept whole and that no template renders: only another server can read it."""
    return {"type": "reasoning", "summary": [], "encrypted_content": "x" * size}


def spellings(response_id: str, rng: random.Random) -> list[str]:
    """Return other ways to write an id, some of which a careless reader takes for the same one."""
    bare = response_id.removeprefix("resp_")
    guessed = response_id[:-1] + rng.choice("0123456789abcdef")
    return [
        *(response_id, response_id, response_id, bare, response_id.upper(), response_id + "\0", guessed, ""),
        *(response_id + "/", "/" + response_id, "x/" + response_id, f"alice\0{response_id}", response_id + " "),
        *(f"{response_id}/input_items", f"{response_id}/cancel", f"../responses/{response_id}", "\ud800", "%2e%2e"),
    ]


class KeptResponseAttacks:
    """Attacks by one thread. ``known``: ids of the attacker's own responses."""

    def __init__(self, sender: Sender, neighbour: Neighbour, record: Record, known: Known, rng: random.Random) -> None:
        self._sender, self._neighbour, self._record = sender, neighbour, record
        self._known, self._rng = known, rng
        self.kinds: list[tuple[Callable[[], None], int]] = [
            (self.foreign_id, 12),
            (self.chain, 5),
            (self.references, 3),
            (self.while_running, 6),
            (self.fill, 1),
        ]

    # --- kinds of attacks ---

    def foreign_id(self) -> None:
        """Ask for the neighbour's response by its id, in every way that an id can be used."""
        rng = self._rng
        ids = self._neighbour.responses.ids
        server, own = rng.choice(ids)
        spelled = rng.choice(spellings(own, rng))
        path = f"{PATH}/{quote(spelled, safe=rng.choice(('', '/.')), errors='surrogatepass')}"
        query = rng.choice(("stream=true", "starting_after=1", "include[]=x", "limit=1"))
        item = {"type": "item_reference", "id": f"msg_{own.removeprefix('resp_')}_{rng.randrange(3)}"}
        limit = {"max_output_tokens": 2, "store": rng.random() < 0.5}
        thefts: list[tuple[str, str, Any]] = [
            ("GET", path, None),
            ("GET", f"{path}?{query}", None),
            ("GET", f"{path}/input_items", None),
            ("DELETE", path, None),
            ("POST", f"{path}/cancel", {}),
            ("POST", PATH, {"input": "Say it again.", "previous_response_id": spelled, **limit}),
            ("POST", PATH, {"input": [item], **limit}),
        ]
        confusions: list[tuple[str, str, Any]] = [
            # An instance believes this field of a router, which puts the conversation into the input.
            ("POST", PATH, {"input": "x", "previous_response_id": spelled, "kept_elsewhere": True, **limit}),
            # The attacker may call its own response like the last one of the neighbour's.
            ("POST", PATH, {"input": "x", "rid": ids[-1][1], **limit}),
            ("POST", PATH, {"input": "x", "prompt_cache_key": own, **limit}),
        ]
        for step in rng.sample([*thefts, *confusions], 3):
            headers = rng.choice(({}, {"x-request-id": own.removeprefix("resp_")}, {"x-pdserve-key-name": "alice"}))
            status, answer = self._ask(*step, url=rng.choice((server, "")), headers=headers)
            if status == 200 and spelled == own != ids[-1][1] and step in thefts:
                self._record.violated(f"another's response was served: {step}: {answer[:300]!r}")

    def chain(self) -> None:
        """Go on with a conversation again and again. Each response keeps all of it."""
        rng = self._rng
        url, previous = self._known.draw(rng) if rng.random() < 0.5 else ("", "")
        url = url or self._sender.url()
        more = [ballast(rng.choice((0, 1000, 2_000_000)))]
        for _ in range(rng.randrange(1, CHAIN)):
            text = {"role": "user", "content": rng.choice(("x", "Why?"))}
            body = {"input": [*more, text], "max_output_tokens": rng.choice((1, 8))}
            if previous:
                body["previous_response_id"] = previous
            status, answer = self._ask("POST", PATH, body, url=url)
            found = RESPONSE_ID.search(answer)
            if status != 200 or found is None:
                break
            previous = found[1].decode()
        if previous and rng.random() < 0.5:
            self._ask("DELETE", f"{PATH}/{quote(previous, safe='')}", None, url=url)

    def references(self) -> None:
        """Name one item of a kept response many times over, so that a short body becomes a long one."""
        rng = self._rng
        url, response_id = self._known.draw(rng)
        own = response_id.removeprefix("resp_")
        reference = {"type": "item_reference", "id": f"msg_{own}_0"}
        odd = {"type": "item_reference", "id": rng.choice((f"msg_{own}_{'9' * 300}", "msg__0", "a" * 100_000, None))}
        count = rng.choice((1, 3, 300, 17_000, 200_000))
        body = {"input": [*[reference] * count, *[odd] * rng.choice((0, 0, 1))], "max_output_tokens": 1}
        if rng.random() < 0.3:
            body["previous_response_id"] = response_id
        self._ask("POST", PATH, body, url=url)

    def while_running(self) -> None:
        """Read, cancel, delete or continue a response while it streams, and read on, wait or leave."""
        rng, url = self._rng, self._sender.url()
        body = {"input": "x", "stream": True, "max_output_tokens": rng.choice((20, 1000)), "metadata": {"a": "b" * 500}}
        headers = {"x-request-id": f"m{rng.getrandbits(24):x}"}
        left, begun = rng.choice((1, 3, 1000)), False

        def reads(answer: bytes) -> bool:
            nonlocal left, begun
            found = RESPONSE_ID.search(answer)
            if found is not None and not begun:
                begun = True
                self._disturb(found[1].decode(), url)
            left -= 1
            if rng.random() < 0.02:
                # A client that reads slowly.
                time.sleep(0.3)
            return left > 0

        self._ask("POST", PATH, body, url=url, headers=headers, reads=reads)

    def fill(self) -> None:
        """Fill the store: the oldest of the attacker's own responses make room, and no one else's."""
        url = self._sender.url()
        for _ in range(FILLED_BYTES // FILLED_PIECE):
            body = {"input": [ballast(FILLED_PIECE), {"role": "user", "content": "x"}], "max_output_tokens": 1}
            if self._ask("POST", PATH, body, url=url).status != 200:
                break

    # --- how ---

    def _disturb(self, response_id: str, url: str) -> None:
        path = f"{PATH}/{quote(response_id, safe='')}"
        steps: list[tuple[str, str, Any]] = [
            ("GET", path, None),
            ("POST", path + "/cancel", {}),
            ("POST", path + "/cancel", {}),
            ("DELETE", path, None),
            ("POST", PATH, {"input": "x", "previous_response_id": response_id, "max_output_tokens": 1}),
            ("POST", "/abort_request", {"rid": response_id}),
        ]
        for method, step, content in self._rng.sample(steps, self._rng.randrange(4)):
            self._ask(method, step, content, url=url, reads=self._rng.choice((read_all, read_none)))

    def _ask(
        self,
        method: str,
        path: str,
        content: Any,
        *,
        url: str = "",
        headers: dict[str, str] | None = None,
        reads: Reads = read_all,
    ) -> Answer:
        server = url or self._sender.url()
        body = json.dumps(content).encode() if content is not None else b""
        answer = self._sender.send("kept responses", method, path, body, url=server, headers=headers, reads=reads)
        if method == "POST" and path == PATH and answer.status == 200:
            self._known.note(server, answer.body)
        return answer
