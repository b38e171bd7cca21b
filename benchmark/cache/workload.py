"""The workload of all contestants: token runs, drawn once, in a file that programs without pdserve can read, too.

``stored`` are prompts that are stored one after the other:

- ``DEEP`` prompts of ``prompt_tokens``;
- prompts that diverge from these at ``path_nodes - 1`` places, and so divide their paths;
- conversations, in which each turn stores all earlier tokens and some more.

``tails`` go on from the deep ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...messages.base import I32
from .options import CacheBenchOptions

DEEP = 8
TAILS = 96
TAIL_TOKENS = 512
BRANCH_TOKENS = 256
VOCABULARY = 30_000


def write_workload(options: CacheBenchOptions, path: Path) -> None:
    """Draw the workload and write it to ``path`` (.npz), with the sizes that measurements need.

    ``stored`` and ``tails`` have the token ids of all prompts, one after another. ``stored_ends`` and ``tails_ends``
    say where each prompt ends.
    """
    rng = np.random.default_rng(0)

    def draw(count: int) -> I32:
        return rng.integers(0, VOCABULARY, count, dtype=np.int32)

    page, run = options.page_size, options.prompt_tokens // options.path_nodes
    branch = -(-BRANCH_TOKENS // page) * page
    deep = [draw(options.prompt_tokens) for _ in range(DEEP)]
    stored = list(deep)
    kept = sum(len(d) for d in deep)
    for prompt in deep:
        for node in range(1, options.path_nodes):
            stored.append(np.concatenate([prompt[: node * run], draw(branch)]))
            kept += branch
    while kept < options.cached_tokens:
        prompt = draw(512 // page * page or page)
        kept += len(prompt)
        for _ in range(int(rng.integers(1, 8))):
            turn = page * int(rng.integers(1, max(2, 1024 // page)))
            prompt = np.concatenate([prompt, draw(turn)])
            stored.append(prompt)
            kept += turn
    tail = -(-TAIL_TOKENS // page) * page
    tails = [np.concatenate([deep[i % DEEP], draw(tail)]) for i in range(TAILS)]
    np.savez(
        path,
        stored=np.concatenate(stored),
        stored_ends=np.cumsum([len(p) for p in stored]),
        tails=np.concatenate(tails),
        tails_ends=np.cumsum([len(p) for p in tails]),
        deep=DEEP,
        page_size=page,
        path_nodes=options.path_nodes,
        kept_tokens=kept,
        decoding=options.decoding,
        evicted_tokens=options.evicted_tokens,
    )
