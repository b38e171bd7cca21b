"""Asks a server's ``/v1/chat/completions`` and reads the streamed answer.

An answer is a generator of ``Chunk``s. Closing it, at its end or before, closes the connection where the answer is not
complete, which is what tells the server to stop.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import msgspec

from ...messages.decode import UndeclaredMessage, decode, shown
from ...router.errors import parse_error
from ..access import KEY_FLAG, decoder_says, key_headers
from .chunk import Chunk

CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 600.0
"""Longest wait for a byte of an answer: its first token may have to queue. Ctrl-C doesn't wait."""
QUESTION_SECONDS = 10.0
"""Maximum seconds for the list of models."""
MAX_BYTES = 16 << 20
"""Maximum bytes of one event, or of an answer that is not a stream."""
DATA, DONE = b"data:", b"[DONE]"


class ChatError(Exception):
    """The server can't be asked, or did not answer as it should; the message says what to do, in one line."""


class ChatTurn(NamedTuple):
    """One turn: ``role`` is "system", "user" or "assistant"."""

    role: str
    content: str


class ServedName(msgspec.Struct, frozen=True):
    """An entry of ``/v1/models``."""

    id: str


class ServedNames(msgspec.Struct, frozen=True):
    """``/v1/models``."""

    data: list[ServedName] = []


class ChatClient:
    """A server, one question at a time. ``close`` it."""

    def __init__(self, url: str, api_key: str | None, sampling: dict[str, Any]) -> None:
        """Make a client of the server at ``url``; it connects with the first question.

        ``sampling`` has fields for every body, like "temperature".
        """
        self._url = url
        self._has_key = api_key is not None
        self._sampling = sampling
        headers = {"content-type": "application/json", **key_headers(api_key)}
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def first_model(self) -> str:
        """Return the name of the first model that the server lists; raises ``ChatError``."""
        with self._plain_errors():
            answer = self._http.get("/v1/models", timeout=QUESTION_SECONDS)
            if answer.status_code != httpx.codes.OK:
                raise ChatError(self._refusal(answer.status_code, answer.content))
            models = decode(msgspec.json.Decoder(ServedNames), answer.content, MAX_BYTES).data
        if not models:
            raise ChatError(f"{self._url} lists no model; name one with --model")
        return models[0].id

    def stream(self, model: str, messages: list[ChatTurn]) -> Generator[Chunk, None, None]:
        """Ask ``model`` to answer the conversation ``messages``, and yield each chunk as it comes.

        Raises ``ChatError``, also in the middle of an answer. Closing the generator ends the answer at the server.
        """
        body = {
            "model": model,
            "messages": [message._asdict() for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        decoder = msgspec.json.Decoder(Chunk)
        # What the terminal gave that is no text becomes "?".
        content = json.dumps(body, ensure_ascii=False).encode(errors="replace")
        with self._plain_errors(), self._http.stream("POST", "/v1/chat/completions", content=content) as answer:
            if answer.status_code != httpx.codes.OK:
                raise ChatError(self._refusal(answer.status_code, answer.read()))
            for event in events(answer.iter_bytes()):
                if event == DONE:
                    return
                chunk = decode(decoder, event, MAX_BYTES)
                if chunk.error is not None:
                    raise ChatError(f"the server ended the answer: {error_text(event)}")
                yield chunk
        raise ChatError("the connection ended in the middle of the answer; the server's log may say why")

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Turn all errors of the connection into ``ChatError``."""
        try:
            yield
        except httpx.ConnectError as e:
            raise ChatError(
                f"no server answers at {self._url} ({shown(str(e))}): start a server (pdserve up), "
                "or say where it is with --url"
            ) from e
        except httpx.TimeoutException as e:
            raise ChatError(f"{self._url} was silent for too long; is it overloaded? Its /health tells") from e
        except httpx.RequestError as e:
            raise ChatError(f"the connection to {self._url} broke ({shown(str(e)) or type(e).__name__})") from e
        except UndeclaredMessage as e:
            raise ChatError(
                f"{self._url} does not answer as OpenAI's chat API does ({decoder_says(e)}); is it the right --url?"
            ) from e

    def _refusal(self, status: int, body: bytes) -> str:
        reason = error_text(body)
        if status == httpx.codes.UNAUTHORIZED:
            return (
                f"the server refuses the key in {KEY_FLAG}" if self._has_key else f"{reason} (give it with {KEY_FLAG})"
            )
        if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
            return f"the server can't take this now: {reason}. Try again in a moment"
        return f"the server answers {status}: {reason}"


def events(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each server-sent event in the body's ``parts``. An event's data is one line.

    Comments and other fields are left out. Lines are split here, because a client library also splits at characters
    that JSON may contain (U+2028). Raises ``ChatError`` for a line without an end.
    """
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from (line[len(DATA) :].strip() for line in lines if line.startswith(DATA))
        if len(rest) > MAX_BYTES:
            raise ChatError("the server sends an event without an end")


def error_text(body: bytes) -> str:
    """Return the message in the body of an error response, or the body's text if it has none, in one line."""
    error = parse_error(body)
    return shown(str(error["message"])) if error else shown(body.decode(errors="replace").strip()) or "no reason given"
