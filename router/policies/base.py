"""A policy chooses one of several healthy instances of the same role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..instance import Instance
from ..request_body import RequestBody


class Policy(ABC):
    """Chooses one instance. A router holds one policy object per role.

    A policy reads a ``RequestBody``, not the client's JSON. A further field is added to ``_Fields`` and ``RequestBody``
    (``router/request_body.py``) and is read by ``RequestBody.parse``. Instances get the field as well. They treat it as
    ``--unknown-fields`` says, unless ``server/http/*/schemas.py`` declares it.
    """

    @abstractmethod
    def choose(self, candidates: Sequence[Instance], request: RequestBody) -> Instance:
        """Return one of ``candidates``. There is at least one, all can serve, in the order of the router's options.

        A call does not mean that the instance gets the request. A unified instance is also chosen to be compared with
        a pair, and each retry chooses again. A prefill may get the whole request (``Fleet.pick``), so the decode that
        was chosen gets none; the instances' option ``--disaggregation-threshold always`` prevents it.

        What instances are doing is in ``Instance``: ``answers``, ``in_flight`` and ``prompt_tokens`` count their work,
        ``report`` is their own word about it. A policy may keep state. It is used on the event loop alone, and is lost
        when the router ends. A policy is not told when a request ends: another count belongs in
        ``Instance.computing`` or ``Answering``.
        """
