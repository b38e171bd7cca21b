"""Limits what the answers to one body repeat of it: each choice of a prompt may hold the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ApiError
from .plan import PromptPlan

MAX_REPEATED = 1 << 26
"""Maximum length of what all answers to a body but the first to each prompt repeat of it, in characters."""
ID_CHARACTERS = 32
"""Characters that a token id counts as: it is an integer in a list."""
CHARACTERS_PER_TOKEN = 4
"""Approximate characters of a token, for prompts that are not encoded yet."""


def check_repeated(plans: Sequence[PromptPlan], *, with_text: bool, more: int = 0) -> None:
    """Raise ``ApiError`` 413 if the answers to ``plans`` repeat more than ``MAX_REPEATED`` together.

    ``with_text``: whether each answer has the text of its prompt. It has the token ids if the plan says so. ``more``:
    characters that each answer repeats of the body beside its prompt.
    """
    length = sum((plan.n - 1) * _size(plan, with_text) + plan.n * more for plan in plans)
    if length > MAX_REPEATED:
        raise ApiError(
            413,
            f"the answers would repeat {length} characters of prompts and settings ({ID_CHARACTERS} for a token id), "
            f"the limit is {MAX_REPEATED}; ask for fewer answers at a time",
        )


def _size(plan: PromptPlan, with_text: bool) -> int:
    text, input_ids, chat = plan.prompt
    characters = len(text or "") + (sum(message.content_size for message in chat.messages) if chat is not None else 0)
    ids = len(input_ids) if input_ids is not None else characters // CHARACTERS_PER_TOKEN
    return (characters if with_text else 0) + (ID_CHARACTERS * ids if plan.return_prompt else 0)
