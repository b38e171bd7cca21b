"""The quantities that a step's time depends on."""

from __future__ import annotations

from typing import NamedTuple


class StepShape(NamedTuple):
    """A step in four counts, whatever its entries.

    ``decodes``: requests that compute one token. ``kv_tokens``: tokens of KV that their attention reads.
    ``prompt_tokens``: tokens of all prompt pieces. ``prompt_pairs``: query-key pairs of the pieces' attention, which
    are ``q * (start + q / 2)`` for ``q`` tokens from position ``start`` on.
    """

    decodes: int = 0
    kv_tokens: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0

    @property
    def tokens(self) -> int:
        """Rows that go through the linear layers."""
        return self.decodes + self.prompt_tokens

    @property
    def decodes_alone(self) -> StepShape:
        """This step without its prompt pieces."""
        return StepShape(self.decodes, self.kv_tokens)

    def with_piece(self, start: int, length: int) -> StepShape:
        """Return this step with ``length`` more prompt tokens, from position ``start`` of their prompt on."""
        pairs = self.prompt_pairs + length * (start + length / 2)
        return StepShape(self.decodes, self.kv_tokens, self.prompt_tokens + length, pairs)
