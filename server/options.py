"""All options of ``pdserve server``, composed of the sections of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..model_runner.options import WorkerOptions
from ..runtime.web.keys import KeyFileError, check_keys
from ..runtime.web.responses.options import ResponseOptions
from ..scheduler.options import SchedulerOptions
from .api_options import ApiOptions, SessionOptions


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ApiOptions, SessionOptions, ResponseOptions, WorkerOptions, SchedulerOptions):
    """Options of ``pdserve server``."""

    def problems(self) -> Iterator[str]:
        """Yield a message if the key files can't be used, or if other hosts could use the server without a key.

        ``--no-keys`` allows the latter. On an instance's further hosts, which serve no API, only the key files are
        checked.
        """
        try:
            # Of an instance on several hosts, the first one answers.
            check_keys(self if not self.node_rank else replace(self, no_keys=True))
        except KeyFileError as e:
            yield str(e)
