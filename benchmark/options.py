"""The options of ``pdserve bench serve``, declared once; the command line and YAML files read them here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from ..runtime.web.keys import KeyFileError, read_key_lines
from .errors import BenchOptionsError

BackendName = Literal["pdserve", "sglang", "vllm", "openai", "llamacpp"]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of ``pdserve bench serve``.

    Parameters
    ----------
    backend
        How to speak to the server: pdserve and sglang use /generate, vllm and openai /v1/completions,
        llamacpp llama-server's own /completion.
    base_url
        Where the server listens.
    model
        Model name to ask for; default: the first that the server's /v1/models lists. Only vllm and openai need it.
    api_key
        Sent as "Authorization: Bearer KEY". Other users of the host can read arguments: prefer api_key_file.
    api_key_file
        File with the key to send; its first one if there are several.
    extra_body
        JSON object; its fields are added to every request's body.
    dataset
        random: random token ids. text: prompts of a file. trace: arrivals, lengths and shared blocks of a Mooncake
        trace, filled with random token ids.
    dataset_path
        File of --dataset text: a line is a prompt or a JSON object with "prompt" and perhaps "output_len"; in a
        .json file, ShareGPT conversations. Or the file of --dataset trace (JSON lines).
    tokenizer
        Tokenizer for --dataset text: prompts are then sent as token ids, and a conversation's own answer says how many
        tokens to ask for. A folder, .gguf file, hub name or "smollm2".
    scenario
        Load of several kinds at once, instead of one data set: "mixed", or a YAML file like
        benchmark/scenarios/mixed.yaml.
    num_prompts
        How many requests to send; default 100 random ones, or all of a file.
    input_len
        Tokens of a random prompt, its shared prefix not counted.
    output_len
        Tokens to ask for; default 128, or what the data set says.
    range_ratio
        Draws random lengths evenly from ±this share around input_len and output_len; 0 keeps them fixed.
    prefix_len
        Tokens that stand before a random prompt and are shared between prompts.
    prefix_share
        Share of the random prompts that begin with a shared prefix; the others have one of their own, as long.
    num_prefixes
        How many different shared prefixes there are.
    min_token_id
        Lowest random token id.
    max_token_id
        Highest random token id.
    length_scale
        Factor for the lengths of a trace, in steps of 1/512.
    time_scale
        Factor for the times between the arrivals of a trace; 0.5 is twice as fast.
    request_rate
        Requests a second, arriving at random (Poisson); "inf" sends all at once. Several values: one run for each.
    burstiness
        1: Poisson arrivals. Below 1 they come in bursts (gamma distribution), above more evenly; "inf": at equal
        intervals.
    max_concurrency
        Most requests under way; with request_rate inf a closed loop. Several values: one run for each.
    seed
        Seed of prompts, lengths and arrival times: an equal command sends equal requests at equal times.
    warmup_requests
        Requests sent before the measurement, with prompts of their own.
    flush_cache
        Empty the server's prefix cache before each run (pdserve and sglang).
    stop_at_eos
        Let answers end early. Otherwise each has exactly the tokens asked for (ignore_eos).
    temperature
        Sampling temperature; 0 takes the likeliest token.
    request_timeout
        Seconds after which a request has failed.
    drain_timeout
        Seconds that the requests under way at the end of a scenario have to finish.
    slo_ttft_ms
        Goodput counts requests with a first token within this time.
    slo_tpot_ms
        Goodput counts requests with at most this time per output token.
    slo_itl_ms
        Goodput counts requests without a longer gap between two chunks than this.
    slo_e2e_ms
        Goodput counts requests that were complete within this time.
    output_json
        File for the results, with one entry a request.
    output_details
        Keep the arrival time of every chunk in the results as well.
    plot
        Folder for PNG plots. Needs matplotlib.
    strict
        Exit with 1 when any request failed; otherwise only when all did.
    """

    backend: BackendName = "pdserve"
    base_url: str = "http://127.0.0.1:30000"
    model: str | None = None
    api_key: str | None = None
    api_key_file: Path | None = None
    extra_body: str | None = None
    dataset: Literal["random", "text", "trace"] = "random"
    dataset_path: Path | None = None
    tokenizer: str | None = None
    scenario: str | None = None
    num_prompts: int | None = None
    input_len: int = 512
    output_len: int | None = None
    range_ratio: float = 0.0
    prefix_len: int = 0
    prefix_share: float = 1.0
    num_prefixes: int = 1
    min_token_id: int = 1000
    max_token_id: int = 29999
    length_scale: float = 1.0
    time_scale: float = 1.0
    request_rate: list[float] = field(default_factory=list)
    burstiness: float = 1.0
    max_concurrency: list[int] = field(default_factory=list)
    seed: int = 0
    warmup_requests: int = 1
    flush_cache: bool = False
    stop_at_eos: bool = False
    temperature: float = 0.0
    request_timeout: float = 600.0
    drain_timeout: float = 120.0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_itl_ms: float | None = None
    slo_e2e_ms: float | None = None
    output_json: Path | None = None
    output_details: bool = False
    plot: Path | None = None
    strict: bool = False

    def check(self) -> None:
        """Raise ``BenchOptionsError`` when these options can't work."""
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise BenchOptionsError(f"--base-url {self.base_url}: write it like http://127.0.0.1:30000")
        if self.scenario is not None and (self.request_rate or self.max_concurrency or self.dataset != "random"):
            raise BenchOptionsError("--scenario says itself what arrives when: drop --dataset and the arrival options")
        if self.dataset != "random" and self.dataset_path is None:
            raise BenchOptionsError(f"--dataset {self.dataset} needs --dataset-path")
        if self.dataset == "trace" and self.request_rate:
            raise BenchOptionsError("a trace has its own arrival times: use --time-scale instead of --request-rate")
        if self.api_key is not None and self.api_key_file is not None:
            raise BenchOptionsError("--api-key and --api-key-file both give the key: drop --api-key")
        _ = self.key  # raises if the file can't be used
        if self.flush_cache and self.backend not in ("pdserve", "sglang"):
            raise BenchOptionsError("--flush-cache works with pdserve and sglang only")
        self._check_numbers()

    @cached_property
    def key(self) -> str | None:
        """API key to send, or None. Raises ``BenchOptionsError`` if its file can't be used.

        The file is read once, so that it may be a pipe.
        """
        if self.api_key_file is None:
            return self.api_key
        try:
            return read_key_lines("--api-key-file", self.api_key_file, is_server=False)[0].key
        except KeyFileError as e:
            raise BenchOptionsError(str(e)) from e

    def _check_numbers(self) -> None:
        for name in ("input_len", "num_prefixes", "length_scale", "burstiness", "request_timeout"):
            if not getattr(self, name) > 0:
                raise BenchOptionsError(f"--{name.replace('_', '-')} must be above 0")
        for name in ("prefix_len", "seed", "warmup_requests", "time_scale", "temperature", "drain_timeout"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BenchOptionsError(f"--{name.replace('_', '-')} must be 0 or more")
        for name in ("num_prompts", "output_len", "slo_ttft_ms", "slo_tpot_ms", "slo_itl_ms", "slo_e2e_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BenchOptionsError(f"--{name.replace('_', '-')} must be above 0")
        if not 0 <= self.range_ratio < 1 or not 0 <= self.prefix_share <= 1:
            raise BenchOptionsError("--range-ratio must be in [0, 1), --prefix-share in [0, 1]")
        if not 0 <= self.min_token_id <= self.max_token_id:
            raise BenchOptionsError("--min-token-id must be 0 or more, and not above --max-token-id")
        if not all(rate > 0 for rate in self.request_rate) or not all(limit > 0 for limit in self.max_concurrency):
            raise BenchOptionsError("--request-rate and --max-concurrency must be above 0")
