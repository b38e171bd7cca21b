"""A model runner over a tiny random model of transformers, and transformers' own answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve.mem_cache.kv_pages.page_order import PageConverter, can_exchange
from pdserve.messages.worker import KVLayout
from pdserve.model_runner.batch.forward_batch import ForwardBatch
from pdserve.model_runner.engines.load import load_model
from pdserve.server.options import ServerOptions

from .passes import forward

PAGE = 4
PAGES = 96
VOCAB = 97
CONTEXT = 256


def draw_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Draw every parameter, biases and norms included, and save nothing."""
    torch.manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
    return model.eval()


class Rows:
    """Rows of tokens, their pages scattered over a pool, and passes over them by ``compute``."""

    def __init__(self, compute: Callable[[ForwardBatch], torch.Tensor]) -> None:
        self._compute = compute
        self.table = torch.full((8, CONTEXT), 10**9, dtype=torch.int32)  # what no row has mapped yet must not matter
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)) + 1
        self._free_pages = order.tolist()
        self.prompt_lens: dict[int, int] = {}  # by row; None stands for unknown
        self._lens = [0] * 8

    def share(self, source: int, row: int, length: int) -> None:
        """Map the first ``length`` positions (whole pages) of ``row`` to the slots of row ``source``."""
        self.table[row, :length] = self.table[source, :length]
        self._lens[row] = length

    def forward(self, *entries: tuple[int, list[int]], logits_at: list[int] | None = None) -> torch.Tensor:
        """Compute ``(row, tokens)`` entries, each behind what its row holds; logits of all tokens, or of some."""
        starts = [self._lens[row] for row, _ in entries]
        for row, tokens in entries:
            for _ in tokens:
                self._append(row)
        spans = [torch.arange(s, s + len(t)) for s, (_, t) in zip(starts, entries, strict=True)]
        slots = [self.table[row, span] for span, (row, _) in zip(spans, entries, strict=True)]
        input_ids = torch.tensor([token for _, tokens in entries for token in tokens])
        wanted = range(len(input_ids)) if logits_at is None else logits_at
        return self._compute(
            ForwardBatch(
                input_ids=input_ids,
                positions=torch.cat(spans),
                out_cache_loc=torch.cat(slots).long(),
                rows=torch.tensor([row for row, _ in entries]),
                starts=starts,
                q_lens=[len(tokens) for _, tokens in entries],
                req_to_token=self.table,
                logit_indices=torch.tensor(list(wanted), dtype=torch.int64),
                prompt_lens=[self.prompt_lens[row] for row, _ in entries] if self.prompt_lens else None,
            )
        )

    def _append(self, row: int) -> None:
        position = self._lens[row]
        first = position % PAGE == 0
        slot = self._free_pages.pop() * PAGE if first else int(self.table[row, position - 1]) + 1
        self.table[row, position] = slot
        self._lens[row] += 1


class Handed(NamedTuple):
    """The KV of ``tokens`` tokens as it leaves for another instance, whole pages: [N, page_bytes]."""

    fingerprint: str
    layout: KVLayout
    tokens: int
    pages: npt.NDArray[np.uint8]


class Harness(Rows):
    """A runner over a tiny model."""

    def __init__(self, folder: Path, **options: object) -> None:
        defaults = {"dtype": "float32", "device": "cpu", "page_size": PAGE, "max_total_tokens": PAGES * PAGE}
        defaults |= {"chunked_prefill_size": -1}  # rows keep all of their pages, in layers with a window, too
        self.runner = load_model(ServerOptions(model_path=str(folder), **(defaults | options)))
        super().__init__(partial(forward, self.runner.engine))

    def hand_over(self, row: int) -> Handed:
        """Return a copy of the row's pages as they are now."""
        tokens = self._lens[row]
        pages = self.table[row, :tokens:PAGE].numpy() // PAGE
        return Handed(self.runner.fingerprint, self.runner.pools.layout, tokens, self._pool_bytes()[pages])

    def take_over(self, row: int, handed: Handed) -> None:
        """Put pages of another runner behind ``row``, as a decode instance does with what it receives."""
        layout = self.runner.pools.layout
        if handed.fingerprint != self.runner.fingerprint or not can_exchange(handed.layout, layout):
            raise ValueError(
                f"{handed.fingerprint}, {handed.layout} can't go on as {self.runner.fingerprint}, {layout}"
            )
        pool = self._pool_bytes()
        for i, page in enumerate(handed.pages):
            target = self._free_pages.pop()
            pool[target] = page
            if handed.layout.order != layout.order:
                PageConverter(layout, handed.layout.order).convert(pool[target])
            self.table[row, i * PAGE : (i + 1) * PAGE] = torch.arange(PAGE) + target * PAGE
        self._lens[row] = handed.tokens

    def _pool_bytes(self) -> npt.NDArray[np.uint8]:
        pools = self.runner.pools
        assert pools.region is not None
        return np.frombuffer(pools.region.buffer, dtype=np.uint8).reshape(pools.plan.num_pages, -1)


def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Return the logits of all tokens."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Return the ``count`` tokens that ``model`` goes on with. Logits of the last token alone are computed."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def draw(length: int, seed: int) -> list[int]:
    """Draw random tokens."""
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality up to the order of sums in float32."""
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
