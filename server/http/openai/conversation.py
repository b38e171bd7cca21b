"""Converts the messages of a body to the conversation that the tokenizer process renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....messages.conversation import ChatMessage, Conversation
from ....messages.packed_text import Text, pack
from .schemas import ChatMessageBody
from .tools import ToolBody, for_template, read_calls


def read_conversation(
    messages: Sequence[ChatMessageBody],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    args: dict[str, Any],
    tools: Sequence[ToolBody] = (),
) -> Conversation:
    """Convert a body's messages to the conversation that the chat template renders.

    ``add_generation_prompt``: begin the assistant's next turn; None means True unless the last message is continued.
    ``continue_final_message``: the answer continues the last message. It also does if that is only a beginning.
    ``args``: variables for the template. ``tools``: what the assistant may call.
    """
    continues = continue_final_message or messages[-1].is_beginning
    begins = add_generation_prompt is not False and not continues
    turns = [_turn(message) for message in messages]
    return Conversation(turns, begins, continues, args, for_template(tools) or None)


def _turn(message: ChatMessageBody) -> ChatMessage:
    # "developer" is OpenAI's newer word for "system"; chat templates know only "system".
    role = "system" if message.role == "developer" else message.role
    thought = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    return ChatMessage(
        role,
        _content(message),
        message.name,
        None if thought is None else pack(thought),
        read_calls(message.tool_calls),
        message.tool_call_id,
    )


def _content(message: ChatMessageBody) -> Text | list[Text] | None:
    if isinstance(message.content, list):
        return [pack(part.text) for part in message.content]
    return None if message.content is None else pack(message.content)
