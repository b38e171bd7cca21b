"""Converts the prompt of a body to the conversation that the tokenizer process renders.

Results of tools become turns of their own, as chat templates know them. Turns of the same role that follow each other
become one, as Anthropic's API has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ....messages.conversation import ChatMessage, ChatToolCall, Conversation
from ....messages.packed_text import Text, pack, pack_joined
from ..errors import bad_request
from ..generation.tool_use import ToolUse
from .blocks import BlockBody, texts_of
from .schemas import MessagesPromptBody

BILLING = "x-anthropic-billing-header:"
"""Beginning of a line of Claude Code's system prompt that is meant for a server.

It is a block of its own, unless a gateway joins the blocks. It differs in each request. In the prompt, it would keep
any prefix from being found in the cache.
"""
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""Form of instructions within a conversation: few chat templates have a place for them but the user's turn."""
FAILED = "Error: "
"""Beginning of the result of a tool that failed: chat templates have no other place for that."""
EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that templates do not know, with the highest that they do."""
FIELD_NAMES = {
    **dict.fromkeys(("text", "input_ids", "continue_final_message"), "messages"),
    "stop": "stop_sequences",
}
"""This API's names of the engine's fields that it calls differently, by the engine's names."""
THINKING = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off: the first in Qwen's, the second in DeepSeek's."""


@dataclass
class Draft:
    """A turn that further blocks may be added to."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ChatToolCall] = field(default_factory=list)
    call_id: str | None = None
    """Call that a turn of role "tool" answers."""

    def message(self) -> ChatMessage:
        """Return the turn as chat templates get it. A turn that has calls alone has no content."""
        thought = pack_joined("\n", self.thoughts) if self.thoughts else None
        return ChatMessage(self.role, self._content(), None, thought, self.calls, self.call_id)

    def _content(self) -> Text | list[Text] | None:
        if len(self.texts) > 1:
            return [pack(text) for text in self.texts]
        if self.texts:
            return pack(self.texts[0])
        return None if self.calls else ""


def read_conversation(body: MessagesPromptBody) -> Conversation:
    """Convert the prompt of ``body`` to a conversation.

    It ends within the last turn if that is the assistant's, unless that has called a tool.
    """
    drafts = [Draft("system", system)] if (system := _system(body)) else []
    for turn in body.messages:
        if turn.text is not None:
            _add_text(drafts, turn.role, turn.text)
        elif turn.role == "assistant" or (turn.role == "user" and not turn.blocks):
            _draft(drafts, turn.role)
        for block in turn.blocks:
            _add(drafts, turn.role, block)
    is_assistants = body.messages[-1].role == "assistant"
    is_open = is_assistants and not drafts[-1].calls
    tools = [tool.for_template() for tool in body.callable_tools]
    return Conversation(
        [draft.message() for draft in drafts], not is_assistants, is_open, _template_args(body), tools or None
    )


def read_answerable(body: MessagesPromptBody) -> Conversation:
    """Convert the prompt of ``body`` to a conversation that an answer can follow.

    Raises ``ApiError`` 400 if its last turn, after turns of the same role became one, has called a tool.
    """
    chat = read_conversation(body)
    if any(turn.tool_calls for turn in chat.messages[-1:]):
        raise bad_request("messages", "must not end with a turn that has a block of type tool_use; add its tool_result")
    return chat


def _system(body: MessagesPromptBody) -> list[str]:
    texts = texts_of(body.system or ())
    return [rest for text in texts if (rest := _without_billing(text)) or not text.startswith(BILLING)]


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\r\n") if text.startswith(BILLING) else text


def _draft(drafts: list[Draft], role: str) -> Draft:
    """Return the last draft if it is of this role, else a new one."""
    if not drafts or drafts[-1].role != role:
        drafts.append(Draft(role))
    return drafts[-1]


def _add(drafts: list[Draft], role: str, block: BlockBody) -> None:
    """Add a block of a message to the last draft, or to a new one. Each result of a tool is one of its own."""
    if block.type == "text":
        _add_text(drafts, role, block.text or "")
    elif block.type == "tool_result":
        texts = block.result_texts or [""]
        if block.is_error:
            texts[0] = FAILED + texts[0]
        drafts.append(Draft("tool", texts, call_id=block.tool_use_id))
    elif block.type == "mid_conv_system":
        _instruct(drafts, block.result_texts)
    elif block.type == "tool_use":
        _draft(drafts, role).calls.append(ChatToolCall(block.id or "", block.name or "", block.input or {}))
    elif block.thinking:
        _draft(drafts, role).thoughts.append(block.thinking)


def _add_text(drafts: list[Draft], role: str, text: str) -> None:
    if role == "system":
        _instruct(drafts, [text])
    else:
        _draft(drafts, role).texts.append(text)


def _instruct(drafts: list[Draft], texts: list[str]) -> None:
    """Add instructions to the system's turn, or to the user's if the conversation has begun."""
    if not drafts or drafts[-1].role == "system":
        _draft(drafts, "system").texts.extend(texts)
    else:
        _draft(drafts, "user").texts.extend(map(REMINDER.format, texts))


def tool_use_of(body: MessagesPromptBody) -> ToolUse:
    """Return what ``body`` says about tools. With the ``tool_choice`` "none" there are none."""
    schemas = {tool.name or "": tool.input_schema or {} for tool in body.callable_tools}
    choice = body.tool_choice
    if choice is None:
        return ToolUse(schemas)
    only = choice.name if choice.type == "tool" else None
    return ToolUse(schemas, choice.type in ("any", "tool"), only, not choice.disable_parallel_tool_use)


def _template_args(body: MessagesPromptBody) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if body.thinking is not None:
        args = dict.fromkeys(THINKING, body.thinking.type != "disabled")
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        args["reasoning_effort"] = EFFORTS.get(effort, effort)
    return args
