"""Names of pages: equal for equal prefixes only, whatever namespaces clients choose."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.radix_nodes import require_true_names
from support.sim import make_generate, make_options, reference_output
from support.sim_tiers import Tiered

from pdserve.mem_cache import page_hash
from pdserve.mem_cache.page_hash import PAGE as PAGE_DOMAIN
from pdserve.mem_cache.page_hash import prompt_hashes
from pdserve.scheduler.page_names import PageNames
from pdserve.scheduler.req import Req, ReqState, Route

SEED = b"\1" * 16
PAGE, REST = [65, 66, 67, 68], [10, 11, 12, 13]
"""A page with bytes that are UTF-8, which a client can give as a namespace."""


def hashes(tokens: list[int], page_size: int, namespace: str) -> list[bytes]:
    return prompt_hashes(SEED, np.array(tokens, dtype=np.int32), page_size, namespace)


@pytest.fixture
def hashed_pages(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What has been hashed as a page since the test began."""
    seen: list[bytes] = []
    inner = page_hash.blake2b

    def counted(content: bytes, *, digest_size: int, person: bytes) -> object:
        if person == PAGE_DOMAIN:
            seen.append(content)
        return inner(content, digest_size=digest_size, person=person)

    monkeypatch.setattr(page_hash, "blake2b", counted)
    return seen


def make_req(tokens: list[int]) -> Req:
    return Req.create(make_generate("r", tokens, max_new_tokens=8), Route.LOCAL, ReqState.WAITING, 8, 1)


def test_a_name_more_costs_one_hash(hashed_pages: list[bytes]) -> None:
    tokens = [i % 97 for i in range(103)]
    req, names = make_req(tokens), PageNames(SEED, 4)
    for limit in range(0, len(tokens) + 9):
        assert len(names.of(req, limit)) == min(limit, len(tokens)) // 4
    assert len(hashed_pages) == 25
    assert names.of(req, 103) == hashes(tokens, 4, "")
    assert names.of(req, 103, 20) == hashes(tokens, 4, "")[20:]


def test_names_of_output_that_is_forgotten_are_forgotten() -> None:
    req, names = make_req([1, 2, 3]), PageNames(SEED, 4)
    for token in (7, 8):
        req.append(token, None)
        assert names.of(req, 4) == hashes([1, 2, 3, token], 4, "")
        req.start_over(0.0)


@pytest.mark.parametrize("with_events", [False, True])
def test_each_page_is_hashed_once(hashed_pages: list[bytes], with_events: bool) -> None:
    """When its request comes, or when the tree stores it: they tell each other."""
    endpoint = "tcp://127.0.0.1:1" if with_events else None
    options = make_options(
        page_size=4,
        max_total_tokens=256,
        chunked_prefill_size=8,
        enable_hierarchical_cache=True,
        kv_debug=True,
        kv_events_endpoint=endpoint,
    )
    sim = Tiered(options, host_pages=64)
    sim.add_tiers(64, None)
    for length in (40, 43):
        hashed_pages.clear()
        tokens = [(7 * i + length) % 97 for i in range(length)]
        sim.submit(f"r{length}", tokens, max_new_tokens=9)
        sim.run_until_idle()
        assert len(hashed_pages) == len(set(hashed_pages)) == (length + 8) // 4
    require_true_names(sim.scheduler.memory.pool.cache)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_namespace_is_no_page(page_size: int) -> None:
    first = PAGE[:page_size]
    namespace = np.array(first, dtype="<i4").tobytes().decode()
    assert not set(hashes(first + REST, page_size, "")) & set(hashes(REST, page_size, namespace))
    assert hashes(first + REST, page_size, "")[:1] == hashes(first, page_size, "")


def test_another_clients_namespace_does_not_answer_a_prompt() -> None:
    """Host memory is looked up by names: a client that could give a page another one's name would get its KV."""
    options = make_options(page_size=4, max_total_tokens=256, chunked_prefill_size=64, enable_hierarchical_cache=True)
    sim = Tiered(options, host_pages=64)
    sim.add_tiers(64, None)
    tail = [14, 15, 16, 17, 1]
    sim.submit("someone", [*PAGE, 90], max_new_tokens=1)
    sim.run_until_idle()
    stranger = make_generate("stranger", REST + tail, max_new_tokens=1)
    namespace = np.array(PAGE, dtype="<i4").tobytes().decode()
    sim.scheduler.arrivals.admit(msgspec.structs.replace(stranger, extra_key=namespace), sim.now)
    sim.run_until_idle()
    sim.submit("client", PAGE + REST + tail, max_new_tokens=4)
    sim.run_until_idle()
    assert sim.tokens["client"] == reference_output(PAGE + REST + tail, 4)
    assert sim.items["client"][-1].meta.cached_tokens == len(PAGE)
