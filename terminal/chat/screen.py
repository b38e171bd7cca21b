"""What the user sees: answers as they come, and what is said about them."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that can move a terminal's cursor, or worse: a model's words come from anywhere, and so do a server's."""


class Screen:
    """Answers go to ``out``. So do notes and errors on a terminal; elsewhere they go to ``err``, apart from answers."""

    def __init__(self, is_terminal: bool, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """Set the outputs. ``out`` and ``err`` are the standard streams by default."""
        self._out = out or sys.stdout
        self._is_terminal = is_terminal
        self._notes = Console(file=self._out if is_terminal else err or sys.stderr, highlight=False, soft_wrap=True)
        self._line_is_open = False
        self._reasons = False
        """Whether reasoning was shown last."""

    def write(self, text: str) -> None:
        """Show a piece of an answer at once; on a terminal, without control characters."""
        if not text:
            return
        if self._reasons:
            self.end_answer()
        self._out.write(text.translate(CONTROLS) if self._is_terminal else text)
        self._out.flush()
        self._line_is_open = not text.endswith("\n")

    def write_reasoning(self, text: str) -> None:
        """Show a piece of the reasoning before an answer, dimmed; only on a terminal."""
        if text and self._is_terminal:
            self._notes.print(text.translate(CONTROLS), style="dim italic", markup=False, end="")
            self._reasons = True
            self._line_is_open = not text.endswith("\n")

    def show_interrupt(self) -> None:
        """Show that Ctrl-C was pressed: end the line on which the terminal has printed "^C"."""
        self._line_is_open = True
        self.end_answer()

    def end_answer(self) -> None:
        """End the answer's last line, where it did not do so itself."""
        if self._line_is_open:
            self._out.write("\n")
            self._out.flush()
        self._line_is_open = self._reasons = False

    def note(self, text: str) -> None:
        """Show a note beside the answers, dimmed, on a line of its own."""
        self._notes.print(text.translate(CONTROLS), style="dim", markup=False)

    def error(self, text: str) -> None:
        """Show ``text``, an error with what to do about it, on a line of its own."""
        self._notes.print(f"pdserve chat: {text.translate(CONTROLS)}", style="red", markup=False)
