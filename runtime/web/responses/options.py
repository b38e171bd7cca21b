"""Options of kept responses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...options import opt, section


@section("Responses", order=66)
@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """Options of the responses that a server keeps for ``previous_response_id``. The server that a client asks keeps
    them: the router, if there is one.
    """

    responses_dir: str | None = opt(
        default=None,
        help=(
            "Folder for the responses of /v1/responses that are kept, so that they survive a restart. One server uses "
            "it at a time. Default: they are kept in memory alone."
        ),
    )
    responses_size: float = opt(
        default=256.0,
        help=(
            "Maximum size of all responses that are kept, in MB. Beyond it, the oldest of the API key with the most "
            "are dropped. 0: none are kept."
        ),
    )
    responses_quota: float = opt(
        default=64.0,
        help="Maximum size of the responses that are kept for one API key, in MB.",
    )

    def problems(self) -> Iterator[str]:
        """Yield a message for each option of responses that has an invalid value."""
        for flag, value in (("--responses-size", self.responses_size), ("--responses-quota", self.responses_quota)):
            if not (value >= 0 and math.isfinite(value)):
                yield f"{flag} is {value:g}: it must be 0 or more"
        if self.responses_dir == "":
            yield "--responses-dir is empty: name a folder, or leave it out"
        if self.responses_dir is not None and not self.responses_size:
            yield "--responses-dir is of no use with --responses-size 0, which keeps no responses"
