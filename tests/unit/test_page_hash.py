"""Names of pages: equal for equal prefixes only, whatever namespaces clients choose."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.sim import make_generate, make_options, reference_output
from support.sim_tiers import Tiered

from pdserve.mem_cache.page_hash import prompt_hashes

SEED = b"\1" * 16
PAGE, REST = [65, 66, 67, 68], [10, 11, 12, 13]
"""A page whose bytes are UTF-8, which a client can give as a namespace."""


def hashes(tokens: list[int], page_size: int, namespace: str) -> list[bytes]:
    return prompt_hashes(SEED, np.array(tokens, dtype=np.int32), page_size, namespace)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_namespace_is_no_page(page_size: int) -> None:
    first = PAGE[:page_size]
    namespace = np.array(first, dtype="<i4").tobytes().decode()
    assert not set(hashes(first + REST, page_size, "")) & set(hashes(REST, page_size, namespace))
    assert hashes(first + REST, page_size, "")[:1] == hashes(first, page_size, "")


def test_another_clients_namespace_does_not_answer_a_prompt() -> None:
    """Host memory is asked by names: who could give a page another one's name would be believed."""
    options = make_options(page_size=4, max_total_tokens=256, chunked_prefill_size=64, enable_hierarchical_cache=True)
    sim = Tiered(options, host_pages=64)
    sim.add_tiers(64, None)
    tail = [14, 15, 16, 17, 1]
    sim.submit("someone", [*PAGE, 90], max_new_tokens=1)
    sim.run_until_idle()
    stranger = make_generate("stranger", REST + tail, max_new_tokens=1)
    namespace = np.array(PAGE, dtype="<i4").tobytes().decode()
    sim.scheduler.admit_message(msgspec.structs.replace(stranger, extra_key=namespace), sim.now)
    sim.run_until_idle()
    sim.submit("client", PAGE + REST + tail, max_new_tokens=4)
    sim.run_until_idle()
    assert sim.tokens["client"] == reference_output(PAGE + REST + tail, 4)
    assert sim.items["client"][-1].meta.cached_tokens == len(PAGE)
