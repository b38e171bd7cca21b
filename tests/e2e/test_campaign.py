"""A disaggregated cluster under random load: everything ends, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import os
import random

import httpx
import pytest
from support.machine import limit
from support.processes import ANSWER_SECONDS, NO_REUSE, Pair, pd_pair

SEEDS = {"shm": 1, "tcp": 2}
# Three times as many as are under way at once; a campaign that hunts for the rare takes thousands.
REQUESTS = int(os.environ.get("PDSERVE_CAMPAIGN_REQUESTS", "72"))


class Tally:
    """How requests ended."""

    def __init__(self) -> None:
        self.finished = self.aborted = self.disconnected = 0
        self.unexpected: list[str] = []


async def one_request(client: httpx.AsyncClient, rng: random.Random, tally: Tally, number: int) -> None:
    fate = rng.choices(["finish", "abort", "disconnect"], [70, 20, 10])[0]
    # Long enough that an abort finds it running.
    wanted = rng.randrange(1, 60) if fate == "finish" else rng.randrange(200, 500)
    shared = rng.choice([0, 0, 40, 200])
    prompt = [rng.randrange(3, 20000) if i >= shared else 100 + i for i in range(shared + rng.randrange(1, 300))]
    params = {"max_new_tokens": wanted, "temperature": rng.choice([0, 1]), "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True, "rid": f"r{number}"}
    quit_after = rng.randrange(0, 40)
    seen = 0
    reason = None
    is_aborted = False
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            tally.unexpected.append(f"{response.status_code} {await response.aread()!r}")
            return
        if fate != "finish" and quit_after == 0:
            if fate == "disconnect":
                tally.disconnected += 1
                return
            is_aborted = True
            await client.post("/abort_request", json={"rid": f"r{number}"})
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                tally.unexpected.append(line)
                return
            seen = event["meta_info"]["completion_tokens"]
            reason = event["meta_info"]["finish_reason"] or reason
            if seen >= quit_after > 0 and reason is None:
                if fate == "disconnect":
                    tally.disconnected += 1
                    return
                # Once, as a client does; the events that were under way go on arriving.
                if fate == "abort" and not is_aborted:
                    is_aborted = True
                    await client.post("/abort_request", json={"rid": f"r{number}"})
    if reason is None:
        tally.unexpected.append(f"r{number} ended without a reason")
    elif reason["type"] == "abort":
        tally.aborted += 1
        if fate != "abort":
            tally.unexpected.append(f"r{number} was aborted and had not asked for it")
    elif seen == wanted:
        tally.finished += 1
    else:
        tally.unexpected.append(f"r{number}: {seen} of {wanted} tokens, {reason}")


async def campaign(pair: Pair, seed: int) -> Tally:
    rng, tally, gate = random.Random(seed), Tally(), asyncio.Semaphore(24)
    seconds = limit(ANSWER_SECONDS)
    async with httpx.AsyncClient(base_url=pair.router.url, timeout=seconds, trust_env=False, limits=NO_REUSE) as client:

        async def gated(number: int, own: random.Random) -> None:
            async with gate:
                await one_request(client, own, tally, number)

        await asyncio.gather(*(gated(i, random.Random(rng.random())) for i in range(REQUESTS)))
    return tally


def test_random_load_with_aborts_and_disconnects_gives_everything_back(small_pair):
    """Pools too small for the load: eviction, waiting for memory and retraction are part of the campaign."""
    run_campaign(small_pair, SEEDS["tcp"])


@pytest.mark.slow
def test_the_same_by_shared_memory(tmp_path, tiny_args):
    args = [*tiny_args, "--max-total-tokens", "4096", "--schedule-conservativeness", "0.3"]
    with pd_pair(tmp_path, "shm", *args) as pair:
        run_campaign(pair, SEEDS["shm"])


def run_campaign(pair: Pair, seed: int) -> None:
    tally = asyncio.run(campaign(pair, seed=seed))
    assert tally.unexpected == []
    assert tally.finished > 0.5 * REQUESTS
    assert tally.aborted > 0.03 * REQUESTS
    assert tally.disconnected > 0.03 * REQUESTS
    pair.assert_all_returned()
    for server in (pair.prefill, pair.decode):
        assert "Traceback" not in server.log(), server.log()
