"""Random conversations, by a seed. Every text has words of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from .conversations import TOOLS, Body

BEGINNINGS = ("", "", "Hello ", "a\n\n", "<b> ", '{"x": "', "<think>hm</think>\n", "</think>", "  ")
ENDS = ("", "", " ", "\n", "\n\n", ".", " \t")


def draw_bodies(seed: int, count: int) -> Iterator[Body]:
    """Yield ``count`` bodies."""
    return (_Draw(random.Random(seed + i)).body() for i in range(count))


class _Draw:
    """Draws one body."""

    def __init__(self, choices: random.Random) -> None:
        self._random = choices
        self._words = 0
        self._calls = 0

    def body(self) -> Body:
        messages = [self._message("system")] if self._chance(0.4) else []
        for _ in range(self._random.randint(1, 4)):
            messages.append(self._message("user"))
            if self._chance(0.05):
                messages.append(self._message("system"))
            messages.extend(self._answer())
        body: Body = {"messages": messages}
        if self._chance(0.5):
            body["tools"] = TOOLS
        last = messages[-1]
        if last["role"] == "assistant" and last.get("content") and "tool_calls" not in last and self._chance(0.7):
            body["continue_final_message"] = True
        if self._chance(0.2):
            body["chat_template_kwargs"] = {"enable_thinking": self._chance(0.5)}
        return body

    def _answer(self) -> list[Body]:
        """Return the assistant's turns: none, text, or calls with their results."""
        kind = self._random.random()
        if kind < 0.5:
            content = None if self._chance(0.05) else self._content()
            return [{"role": "assistant", "content": content, **self._thought()}]
        if kind > 0.75:
            return []
        calls = [self._call() for _ in range(self._random.randint(1, 2))]
        content = self._random.choice([None, "", self._content()])
        turns = [{"role": "assistant", "content": content, "tool_calls": calls, **self._thought()}]
        turns += [{**self._message("tool"), "tool_call_id": call["id"]} for call in calls]
        return [*turns, self._message("assistant")] if self._chance(0.6) else turns

    def _message(self, role: str) -> Body:
        return {"role": role, "content": self._content()}

    def _content(self) -> Any:
        if self._chance(0.7):
            return self._text()
        return [{"type": "text", "text": self._text()} for _ in range(self._random.randint(1, 3))]

    def _thought(self) -> Body:
        return {"reasoning_content": self._text()} if self._chance(0.3) else {}

    def _call(self) -> Body:
        self._calls += 1
        name = self._random.choice([tool["function"]["name"] for tool in TOOLS])
        function = {"name": name, "arguments": {"city": self._word()}}
        return {"id": f"call{self._calls:05}", "type": "function", "function": function}

    def _text(self) -> str:
        if self._chance(0.1):
            return self._random.choice(["", " "])
        return f"{self._random.choice(BEGINNINGS)}{self._word()} {self._word()}{self._random.choice(ENDS)}"

    def _word(self) -> str:
        """Return a word of letters that is a part of no other."""
        self._words += 1
        return "w" + "".join(chr(ord("a") + int(digit)) for digit in f"{self._words:04}") + "x"

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability
