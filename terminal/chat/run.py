"""``pdserve chat``: a conversation with a running server, in a terminal or line by line through a pipe."""

from __future__ import annotations

import io
import os
import sys
from contextlib import closing, suppress
from typing import Any

from ...runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from ..access import AccessError, check_server_url, read_api_key
from .client import ChatClient, ChatError
from .options import ChatOptions
from .screen import Screen
from .session import ChatSession, End

PROMPT = "> "
EXIT_INTERRUPTED = 130
"""What shells report of a process that Ctrl-C ended."""


def run_chat(options: ChatOptions) -> int:
    """Talk until the user leaves; returns the exit code: 0, 1 after an error, 2 for a bad option, 130 after Ctrl-C."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if is_terminal:
        _edit_lines()
    screen = Screen(is_terminal)
    try:
        api_key = read_api_key(options.api_key_file)
        with closing(ChatClient(check_server_url(options.url), api_key, _sampling(options))) as client:
            return _talk(options, client, screen, is_terminal)
    except AccessError as e:
        screen.error(str(e))
        return EXIT_USAGE
    except ChatError as e:
        screen.error(str(e))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone. Python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _talk(options: ChatOptions, client: ChatClient, screen: Screen, is_terminal: bool) -> int:
    model = options.model or client.first_model()
    if is_terminal:
        screen.note(f"{model} at {options.url}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    session = ChatSession(client, screen, model, options.system, goes_on=is_terminal)
    end = session.run(_typed_line if is_terminal else _next_line)
    return EXIT_FAILED if end is End.FAILED else 0


def _sampling(options: ChatOptions) -> dict[str, Any]:
    fields = {"max_completion_tokens": options.max_tokens, "temperature": options.temperature}
    return {name: value for name, value in fields.items() if value is not None}


def _edit_lines() -> None:
    """Give ``input`` line editing and a history, where Python was built with it."""
    with suppress(ImportError):
        import readline

        # So that several pasted lines are one message. Python switches it off by default.
        readline.parse_and_bind("set enable-bracketed-paste on")


def _typed_line() -> str | None:
    """Read a line that the user types, after a prompt. Return None for Ctrl-D, and "" for Ctrl-C."""
    try:
        return input(PROMPT)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D leaves)")
        return ""


def _next_line() -> str | None:
    """Read the next line of standard input, with its line end; None at the end of the input."""
    return sys.stdin.readline() or None
