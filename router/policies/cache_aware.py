"""Choice of the instance that has most of a prompt in its prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from ..facts import Facts
from ..instance import Instance, Role
from ..load import BalanceLimits, work
from ..targets import Target, legs
from .least_load import LeastLoadPolicy
from .options import PolicyOptions
from .prefix_table import PrefixTable


class CacheAwarePolicy(LeastLoadPolicy):
    """Choice of the instance that was sent the longest prefix of the prompt.

    It reads no cache: it assumes that instances keep what they were sent last. SGLang's router and smg have a policy of
    this name, which keeps a tree of the prompts themselves. A request goes to the instance with the least load instead
    in any of these cases:

    - The known part of its prompt is smaller than the option ``cache_threshold``.
    - The instance exceeds the balance limits.
    - The prompts that wait at the instance take longer than the known part saves.
    """

    def __init__(self, options: PolicyOptions) -> None:
        super().__init__(options)
        self._threshold = options.cache_threshold
        self._limits = BalanceLimits(options.balance_abs_threshold, options.balance_rel_threshold)
        self._table = PrefixTable(options.cache_table_blocks)
        self._new_numbers = count()
        self._numbers: dict[Instance, int] = {}
        """Number of each instance in the table. It is never given to another one, so what the table has about an
        instance that left means nothing."""

    def choose_leg(self, role: Role, candidates: Sequence[Instance], facts: Facts) -> Instance:
        """Return the candidate with the longest prefix, unless that is too short or the candidate has too much to do.

        Of several, return the one with the least load.
        """
        if len(candidates) > 1 and (blocks := facts.blocks):
            by_number = {self._numbers[i]: i for i in candidates if i in self._numbers}
            known = self._table.match(blocks, by_number)
            if known.blocks and known.blocks >= self._threshold * len(blocks):
                chosen = super().choose_leg(role, [by_number[number] for number in known.holders], facts)
                saved = facts.prompt_tokens * known.blocks // len(blocks)
                if self._is_worth_it(role, chosen, candidates, saved):
                    return chosen
        return super().choose_leg(role, candidates, facts)

    def _is_worth_it(self, role: Role, chosen: Instance, candidates: Sequence[Instance], saved: int) -> bool:
        """Return whether ``chosen``, which has ``saved`` tokens of the prompt, should serve rather than another one."""
        if self._limits.exceeds(chosen, candidates):
            return False
        # At a decode, prompts do not wait for each other.
        return role is Role.DECODE or work(chosen) - min(map(work, candidates)) <= saved

    def sent(self, target: Target, facts: Facts) -> None:
        """Record that the instances of ``target`` come to have the prompt."""
        if blocks := facts.blocks:
            numbers = tuple(self._numbers[i] for i in legs(target) if i in self._numbers)
            self._table.record(blocks, numbers)

    def joined(self, instance: Instance) -> None:
        """Give ``instance`` a new number."""
        self._numbers[instance] = next(self._new_numbers)

    def left(self, instance: Instance) -> None:
        """Forget the number of ``instance``, and so all of its blocks."""
        self._numbers.pop(instance, None)
