"""Choice of the instance that has most of a prompt in its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from ..facts import BLOCK_BYTES, Facts
from ..instance import Instance, Role
from ..load import work
from ..targets import Target, legs
from ..work import believed_tokens
from .affinity import AffinityPolicy, Preference
from .options import PolicyOptions
from .prefix_table import PrefixTable


class CacheAwarePolicy(AffinityPolicy):
    """Choice of the instance that has answered the longest prefix of the prompt.

    It reads no cache: it assumes that instances keep what they have computed last. SGLang's router and smg have a
    policy of this name, which keeps a tree of the prompts themselves. A request goes to the instance with the least
    load instead in any of these cases:

    - The known part of its prompt is smaller than the option ``cache_threshold``.
    - The instance exceeds the balance limits.
    - The prompts that wait at the instance take longer than the known part saves.
    """

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._threshold = options.cache_threshold
        self._table = PrefixTable(options.cache_table_blocks)
        self._new_numbers = count()
        self._numbers: dict[Instance, int] = {}
        """Number of each instance in the table. It is never given to another one, so what the table has about an
        instance that left means nothing."""

    def preferred(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Preference | None:
        """Return the candidate with the longest prefix, unless that is too short or the prompts before it take longer.

        Of several, return the one with the least load.
        """
        if not (blocks := facts.blocks):
            return None
        by_number = {self._numbers[i]: i for i in candidates if i in self._numbers}
        known = self._table.match(facts.owner, blocks, by_number)
        if not known.blocks or known.blocks < self._threshold * len(blocks):
            return None
        chosen = self.least_loaded(role, [by_number[number] for number in known.holders], facts)
        tokens = believed_tokens(chosen, facts.prompt_tokens, facts.body.batch_size or 1)
        saved = tokens * known.blocks * BLOCK_BYTES // facts.prompt_bytes
        # At a decode, prompts do not wait for each other.
        if role is not Role.DECODE and work(chosen) - min(map(work, candidates)) > saved:
            return None
        return Preference(chosen, saved)

    def began(self, target: Target, facts: Facts) -> None:
        """Record that the instances of ``target`` have the prompt. One that refuses a request does not compute it."""
        if blocks := facts.blocks:
            numbers = tuple(self._numbers[i] for i in legs(target) if i in self._numbers)
            self._table.record(facts.owner, blocks, numbers)

    def joined(self, instance: Instance) -> None:
        """Give ``instance`` a new number."""
        self._numbers[instance] = next(self._new_numbers)

    def left(self, instance: Instance) -> None:
        """Forget the number of ``instance``, and so all of its blocks."""
        self._numbers.pop(instance, None)
