"""The options of ``pdserve check``, declared once; the command line and YAML files read them here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...model_runner.options import WorkerOptions
from ...router.options import RouterOptions
from ..access import AccessError, check_server_url

MAX_PORT = 65535


class CheckOptionsError(ValueError):
    """An option that can't work; the message says what to write instead."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of ``pdserve check``.

    Parameters
    ----------
    model_path
        Model to look at as well: can it be served, and does it fit? A path or name as in pdserve server. Nothing is
        downloaded.
    revision
        Commit, tag or branch of a hub model, as in pdserve server.
    url
        Server or router to look at as well: is it there, healthy, and in touch with its peers?
    api_key_file
        File with that server's API key. Of several keys, the first.
    ports
        Ports that should be free; default: 8000 (router), 30000 (instance) and 8998 (bootstrap server).
    json
        Print JSON, for programs.
    """

    model_path: str | None = None
    revision: str | None = None
    url: str | None = None
    api_key_file: Path | None = None
    ports: list[int] = field(default_factory=list)
    json: bool = False

    def check(self) -> None:
        """Raise ``CheckOptionsError`` for an invalid URL or port, or an option without the one that it belongs to."""
        if self.revision is not None and self.model_path is None:
            raise CheckOptionsError("--revision is of a hub model: name it with --model-path")
        if self.url is not None:
            try:
                check_server_url(self.url)
            except AccessError as e:
                raise CheckOptionsError(str(e)) from None
        elif self.api_key_file is not None:
            raise CheckOptionsError("--api-key-file is for a server: name it with --url")
        if bad := [port for port in self.ports if not 1 <= port <= MAX_PORT]:
            raise CheckOptionsError(f"--ports: {bad[0]} is not a port (1 to {MAX_PORT})")

    @property
    def ports_to_check(self) -> dict[int, str]:
        """Return the ports to check, each with its usual listener ("router"); "" for ports that the user named."""
        if self.ports:
            return dict.fromkeys(self.ports, "")
        server = WorkerOptions()
        return {
            RouterOptions().port: "router",
            server.port: "instance",
            server.default_bootstrap_port: "bootstrap server",
        }
