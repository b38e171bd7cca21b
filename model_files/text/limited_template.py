"""A chat template in a process of its own (``template_process.py``), so that a bad one can't stop the server.

started ──load()──▶ ready ──render()──▶ ready …
   ▲                  └── it took too much, or died: killed, PromptError
   └──────────────────────────────┘ at once, and given the template again
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from ...messages.conversation import Conversation
from ...runtime.python import python_command
from ...runtime.refusal_log import RefusalLog
from .errors import PromptError, TokenizerLoadError
from .named_templates import NamedTemplates
from .rendering import BrokenStream, Frames, Rendered, RenderLimits, TemplateSource

log = logging.getLogger(__name__)
FIELD = "messages"
MODULE = "pdserve.model_files.text.template_process"


class LimitedTemplate:
    """Renders conversations. Any thread may; one waits for the other."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        """Start the process without waiting for it.

        It begins with its imports, before ``load`` sends it the template.
        """
        self._limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._template: TemplateSource | None = None
        self._is_ready = False
        self._failures = RefusalLog(log, "chat template")
        self._start()

    def load(self, sources: NamedTemplates, special_tokens: Mapping[str, str]) -> None:
        """Send the templates to the process and wait until they are compiled. Call this before ``render``.

        Raises ``TokenizerLoadError``, and then the process is ended.
        """
        self._template = TemplateSource(sources, dict(special_tokens), self._limits)
        try:
            self._frames.send(self._template, self._deadline())
            self._get_ready()
        except (BrokenStream, OSError) as e:
            self.close()
            raise TokenizerLoadError(
                f"{sources.origin} can't be compiled: {self._reason(e)}; see --chat-template"
            ) from e

    def render(self, chat: Conversation) -> str:
        """Return the text that the template makes of ``chat``, for the model to continue; raises ``PromptError``.

        A process that takes too much or dies is replaced by a new one.
        """
        with self._lock:
            if self._process.poll() is not None:
                self._restart()
            try:
                self._get_ready()
                self._frames.send(chat, self._deadline())
                rendered = self._frames.receive(Rendered, self._deadline())
            except (BrokenStream, TokenizerLoadError, OSError) as e:
                self.close()
                reason = self._reason(e)
                self._failures.add(reason)
                self._restart()
                raise PromptError(FIELD, f"the model's chat template can't render this conversation: {reason}") from e
        if rendered.error:
            raise PromptError(rendered.field or FIELD, rendered.error)
        return rendered.text.decode(errors="surrogatepass")

    def close(self) -> None:
        """Kill the process."""
        self._frames.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = python_command("-m", MODULE)
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        self._frames, self._is_ready = Frames(ours), False

    def _restart(self) -> None:
        """Start a new process and send it the template, without waiting until it is ready. The next ``render`` waits.

        If the start fails, the next ``render`` tries again.
        """
        assert self._template is not None, "load() comes first"
        self._frames.close()
        with suppress(OSError):
            self._start()
            self._frames.send(self._template, self._deadline())

    def _get_ready(self) -> None:
        if self._is_ready:
            return
        reply = self._frames.receive(Rendered, self._deadline())
        if reply.error:
            raise TokenizerLoadError(reply.error)
        self._is_ready = True

    def _deadline(self) -> float:
        """Return when an exchange with the process that begins now must have ended, by the monotonic clock."""
        return time.monotonic() + self._limits.seconds

    def _reason(self, error: Exception) -> str:
        """Explain why the process, which has been ended, did not answer."""
        if self._process.returncode == -signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_seconds:g} s of a processor"
        if isinstance(error, TimeoutError):
            return f"it takes more than {self._limits.seconds:g} s"
        if isinstance(error, TokenizerLoadError):
            return str(error)
        return f"its process ended ({self._process.returncode})"
