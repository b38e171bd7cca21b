"""Converts the messages of a body to the conversation that the tokenizer process renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....messages.conversation import ChatMessage, Conversation
from ....messages.packed_text import pack
from .schemas import ChatMessageBody


def read_conversation(
    messages: Sequence[ChatMessageBody],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    args: dict[str, Any],
) -> Conversation:
    """Return the conversation of a body's messages.

    ``add_generation_prompt``: None means True unless ``continue_final_message``. ``args``: variables for the model's
    template.
    """
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    turns = [_turn(message) for message in messages]
    return Conversation(turns, add_generation_prompt, continue_final_message, args)


def _turn(message: ChatMessageBody) -> ChatMessage:
    # "developer" is OpenAI's newer word for "system"; chat templates know only "system".
    role = "system" if message.role == "developer" else message.role
    thought = message.reasoning_content
    return ChatMessage(role, pack(message.text), message.name, None if thought is None else pack(thought))
