"""Converts the items of a body to the conversation that the tokenizer process renders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ....messages.conversation import ChatMessage, ChatToolCall, Conversation
from ....messages.packed_text import Text, pack, pack_joined
from .items import CALL, MESSAGE, OUTPUT, REASONING, InputItem
from .schemas import ResponsesBody

SYSTEM_ROLES = ("system", "developer")
NO_EFFORT = "none"
THINKING = ("enable_thinking", "thinking")
"""Template arguments that say whether the model reasons. Which one has an effect depends on the template."""


@dataclass
class _AssistantTurn:
    """An assistant's turn that grows: reasoning, then text, then calls.

    After a call it takes whatever the assistant says, as templates want the outputs of calls right after their turn.
    """

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] | None = None
    calls: list[ChatToolCall] = field(default_factory=list)

    def takes(self, item: InputItem) -> bool:
        """Return whether ``item`` can still be a part of this turn."""
        if item.type == MESSAGE and item.role != "assistant":
            return False
        return item.type == CALL or (item.type != OUTPUT and (self.texts is None or bool(self.calls)))

    def add(self, item: InputItem) -> None:
        """Add ``item``, which the turn takes."""
        if item.type == CALL:
            self.calls.append(ChatToolCall(item.call_id or "", item.name or "", item.decoded))
        elif item.type == REASONING:
            self.thoughts.append(item.thought())
        else:
            self.texts = [*(self.texts or ()), *item.texts()]

    def message(self) -> ChatMessage:
        """Return the turn as the template gets it."""
        return ChatMessage(
            "assistant",
            None if self.texts is None else _content(self.texts),
            reasoning_content=pack_joined("\n\n", self.thoughts) if self.thoughts else None,
            tool_calls=self.calls,
        )


def read_conversation(body: ResponsesBody) -> Conversation:
    """Convert instructions, items, tools and template arguments of ``body`` to a conversation.

    System and developer messages before all others become one system message, with the instructions before them: many
    templates know only one. Tools are left out if ``tool_choice`` is "none".
    """
    items = [body.input] if isinstance(body.input, str) else body.input
    system = [body.instructions] if body.instructions else []
    first = 0
    for item in items:
        if isinstance(item, str) or item.type != MESSAGE or item.role not in SYSTEM_ROLES:
            break
        system += item.texts()
        first += 1
    messages = [ChatMessage("system", pack_joined("\n\n", system))] if system else []
    messages += _turns(items[first:])
    args = dict(body.chat_template_kwargs)
    if body.reasoning.effort is not None:
        args = {"reasoning_effort": body.reasoning.effort, **args}
    if body.reasoning.effort == NO_EFFORT:
        args = {**dict.fromkeys(THINKING, False), **args}
    tools = [tool.for_template() for tool in body.functions] if body.tool_choice != "none" else []
    return Conversation(messages, template_args=args, tools=tools or None)


def _turns(items: Iterable[InputItem | str]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    turn: _AssistantTurn | None = None
    broken: set[str | None] = set()
    for item in items:
        if isinstance(item, str):
            messages.append(ChatMessage("user", pack(item)))
            continue
        if item.type == REASONING and not item.thought():
            # Only another server can read it.
            continue
        if item.is_broken or (item.type == OUTPUT and item.call_id in broken):
            # No template could print it, nor what a client answers to it.
            broken.add(item.call_id)
            continue
        if turn is not None and not turn.takes(item):
            messages.append(turn.message())
            turn = None
        if item.type == OUTPUT:
            messages.append(ChatMessage("tool", _content(item.texts()), tool_call_id=item.call_id))
        elif item.type in (CALL, REASONING) or item.role == "assistant":
            turn = turn or _AssistantTurn()
            turn.add(item)
        else:
            role = "system" if item.role in SYSTEM_ROLES else item.role or "user"
            messages.append(ChatMessage(role, _content(item.texts())))
    return [*messages, turn.message()] if turn is not None else messages


def _content(texts: list[str]) -> Text | list[Text]:
    return pack(texts[0]) if len(texts) == 1 else [pack(text) for text in texts]
