"""One conversation: read a line, ask, show the answer, remember both.

A line that begins with "/" is a command; "//" begins a message that begins with "/". What was said before goes along
with each question. An answer that the user cut off is remembered as far as it came; one that failed is forgotten, with
its question.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from enum import Enum, auto

from .answer import StreamedAnswer
from .client import ChatClient, ChatError, ChatTurn
from .screen import Screen

HELP = """\
/clear        forget the conversation
/system TEXT  what the model is told before it, from now on; without TEXT nothing
/help         this
/exit         leave; so does Ctrl-D
Ctrl-C stops an answer. A message that begins with a slash is written with two: //"""

ReadLine = Callable[[], str | None]


class End(Enum):
    """How a session came to its end."""

    LEFT = auto()
    FAILED = auto()


class ChatSession:
    """A conversation in the terminal: ``run`` reads inputs, streams answers and obeys commands until its end."""

    def __init__(self, client: ChatClient, screen: Screen, model: str, system: str | None, *, goes_on: bool) -> None:
        """Start a conversation. With ``goes_on``, Ctrl-C and errors only end an answer, because a user can type on."""
        self._client = client
        self._screen = screen
        self._model = model
        self._system = system
        self._goes_on = goes_on
        self._turns: list[ChatTurn] = []

    def run(self, read_line: ReadLine) -> End:
        """Talk until ``read_line`` returns None or "/exit", and return how the conversation ended.

        Unless ``goes_on`` was set, an error ends it as well, and Ctrl-C raises ``KeyboardInterrupt``.
        """
        while True:
            try:
                line = read_line()
                if line is None or not self._take(line):
                    return End.LEFT
            except ChatError as e:
                self._screen.end_answer()
                self._screen.error(str(e))
                if not self._goes_on:
                    return End.FAILED
            except KeyboardInterrupt:
                # Between two answers there is nothing to stop.
                if not self._goes_on:
                    raise
                self._screen.show_interrupt()

    def _take(self, line: str) -> bool:
        """Handle a line of the user: run the command in it, or ask the model and show its answer.

        Return False if it is a command to leave. ``//`` at its beginning stands for a ``/`` that begins no command.
        Raises ``ChatError``.
        """
        text = line.strip()
        if text.startswith("//") or (text and not text.startswith("/")):
            self._ask(text.removeprefix("/") if text.startswith("//") else text)
            return True
        command, _, rest = text.partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/clear":
                self._turns.clear()
                self._screen.note("The conversation is forgotten.")
            case "/system":
                self._system = rest.strip() or None
                self._screen.note("The model is told so from now on." if rest.strip() else "The model is told nothing.")
            case "/help":
                self._screen.note(HELP)
            case _:
                self._screen.note(f"There is no command {command}; /help lists them.")
        return True

    def _ask(self, text: str) -> None:
        question = ChatTurn("user", text)
        system = [ChatTurn("system", self._system)] if self._system is not None else []
        answer = StreamedAnswer()
        try:
            with closing(self._client.stream(self._model, [*system, *self._turns, question])) as chunks:
                for chunk in chunks:
                    self._screen.write_reasoning(chunk.reasoning)
                    self._screen.write(answer.add(chunk))
        except KeyboardInterrupt:
            if not self._goes_on:
                raise
            answer.stopped = True
            self._screen.show_interrupt()
        self._screen.end_answer()
        # Templates want the roles to take turns, so a question without any answer is not kept.
        if answer.text or not answer.stopped:
            self._turns += [question, ChatTurn("assistant", answer.text)]
        self._screen.note(answer.summary())
