"""How to ask each kind of server for a stream of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import orjson

from .errors import RequestError, ServerError, WorkloadError
from .http_client import HttpClient
from .options import BenchOptions
from .prompts import RequestSpec
from .readers import AnswerReader, CompletionReader, GenerateReader, LlamaCppReader


class Backend(ABC):
    """One API: where to post, what, and how to read the answer."""

    path: str

    def __init__(self, options: BenchOptions) -> None:
        self._options = options
        self._extra = _read_extra(options.extra_body)

    async def prepare(self, client: HttpClient) -> None:
        """Ask the server, once before all requests, for what they need; by default nothing. Raises ``ServerError``."""
        return

    def body(self, spec: RequestSpec) -> bytes:
        """Return the JSON body of the request for ``spec``: its fields, and those of --extra-body."""
        return orjson.dumps({**self.fields(spec), **self._extra}, option=orjson.OPT_SERIALIZE_NUMPY)

    @abstractmethod
    def fields(self, spec: RequestSpec) -> dict[str, Any]:
        """Return the JSON fields of the request for ``spec``, without those of --extra-body."""

    @abstractmethod
    def reader(self) -> AnswerReader:
        """Return a new reader for one streamed answer."""


class GenerateBackend(Backend):
    """pdserve's and SGLang's native API."""

    path = "/generate"

    def fields(self, spec: RequestSpec) -> dict[str, Any]:
        options = self._options
        return {
            "text" if isinstance(spec.prompt, str) else "input_ids": spec.prompt,
            "sampling_params": {
                "max_new_tokens": spec.output_len,
                "temperature": options.temperature,
                "ignore_eos": not options.stop_at_eos,
            },
            "stream": True,
        }

    def reader(self) -> AnswerReader:
        return GenerateReader()


class CompletionBackend(Backend):
    """``/v1/completions``, as vLLM and others have it."""

    path = "/v1/completions"

    async def prepare(self, client: HttpClient) -> None:
        self._model = self._options.model or await self._first_model(client)

    async def _first_model(self, client: HttpClient) -> str:
        try:
            return str((await client.get_json("/v1/models"))["data"][0]["id"])
        except (RequestError, KeyError, IndexError, TypeError) as e:
            raise ServerError(f"/v1/models names no model ({e}); give --model") from e

    def fields(self, spec: RequestSpec) -> dict[str, Any]:
        options = self._options
        return {
            "model": self._model,
            "prompt": spec.prompt,
            "max_tokens": spec.output_len,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            # An OpenAI extension that strict servers refuse: left out when it asks for nothing.
            **({} if options.stop_at_eos else {"ignore_eos": True}),
        }

    def reader(self) -> AnswerReader:
        return CompletionReader(counts_empty=self._options.backend == "vllm")


class LlamaCppBackend(Backend):
    """llama-server's own API."""

    path = "/completion"

    def fields(self, spec: RequestSpec) -> dict[str, Any]:
        options = self._options
        return {
            "prompt": spec.prompt,
            "n_predict": spec.output_len,
            "temperature": options.temperature,
            "stream": True,
            "cache_prompt": True,
            "ignore_eos": not options.stop_at_eos,
        }

    def reader(self) -> AnswerReader:
        return LlamaCppReader()


def make_backend(options: BenchOptions) -> Backend:
    """Make the backend that the options name; raises ``WorkloadError`` if --extra-body is no JSON object."""
    if options.backend in ("pdserve", "sglang"):
        return GenerateBackend(options)
    return LlamaCppBackend(options) if options.backend == "llamacpp" else CompletionBackend(options)


def _read_extra(text: str | None) -> dict[str, Any]:
    try:
        extra = orjson.loads(text or "{}")
    except orjson.JSONDecodeError as e:
        raise WorkloadError(f"--extra-body: {e}") from e
    if not isinstance(extra, dict):
        raise WorkloadError('--extra-body must be a JSON object, like {"priority": 1}')
    return extra
