"""What orders to an instance take."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from ..bodies import unserved
from ..bodies.fields import Body, FieldError
from ..bodies.unserved import Unserved


class AbortBody(Body):
    """``POST /abort_request``: one running request by its id, or all."""

    unserved: ClassVar[Unserved] = {"abort_message": unserved.ANYTHING}

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _check_target(self) -> AbortBody:
        if bool(self.rid) == self.abort_all:
            raise FieldError("rid", 'give either "rid" or "abort_all": true')
        return self
