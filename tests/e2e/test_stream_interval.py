"""``--stream-interval`` on a real pair: the answers of a server that sends each token, in fewer events."""

from __future__ import annotations

import json

import pytest
from support.processes import ONE_THREAD, Launched, launched, pd_pair

TOKENS, INTERVAL = 40, 3
PROMPTS = [[50 + i, 900, 77 * i + 5, 4000] for i in range(6)]


def body(prompt: list[int], **more) -> dict:
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **more.pop("sampling", {})}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **more}


def stream(server: Launched, request: dict) -> list[dict]:
    """Return every event of a streamed answer."""
    with server.client.stream("POST", server.url + "/generate", json={**request, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def comparable(answer: dict) -> dict:
    """Return the parts of an answer that do not depend on the run: text, tokens, counts, logprobs."""
    drawn = ("id", "e2e_latency", "timing", "retractions")
    return {**answer, "meta_info": {k: v for k, v in answer["meta_info"].items() if k not in drawn}}


@pytest.mark.slow
def test_a_pair_with_an_interval_gives_the_answers_of_a_server_without(tmp_path, tiny_args):
    with launched(tmp_path, "unified", "server", *ONE_THREAD, *tiny_args) as unified:
        unified.wait_healthy()
        plain = [comparable(unified.generate(**body(prompt))) for prompt in PROMPTS]
        stops = [answer["text"][20:24] for answer in plain]
        stopped = [
            comparable(unified.generate(**body(prompt, sampling={"stop": stop})))
            for prompt, stop in zip(PROMPTS, stops, strict=True)
        ]
    with pd_pair(tmp_path, "shm", *tiny_args, "--stream-interval", str(INTERVAL)) as pair:
        for prompt, stop, whole, cut in zip(PROMPTS, stops, plain, stopped, strict=True):
            events = stream(pair.router, body(prompt))
            counts = [event["meta_info"]["completion_tokens"] for event in events]
            # Events that a slow reader finds together are one, so some may be missing, but none is in between.
            assert {count % INTERVAL for count in counts[:-1]} == {1}
            assert counts[-1] == TOKENS
            assert comparable(events[-1]) == whole
            assert comparable(stream(pair.router, body(prompt, sampling={"stop": stop}))[-1]) == cut
            assert comparable(pair.router.generate(**body(prompt))) == whole
        pair.assert_all_returned()
