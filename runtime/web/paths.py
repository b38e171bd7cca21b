"""Declarations of HTTP paths, and the table that finds them. ``apis.py`` has the declarations.

A path that is not in the table does not exist: it is a 404, whatever an application has routes for.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, Flag, auto
from typing import NamedTuple

from .errors import ErrorShape, plain_error
from .sse import OPENAI_STREAM, StreamFormat

DOT_SEGMENTS = frozenset({".", ".."})
GET, POST, PATCH, DELETE, GET_OR_POST = ("GET",), ("POST",), ("PATCH",), ("DELETE",), ("GET", "POST")


class Access(Enum):
    """The clients that may use a path."""

    OPEN = auto()
    """All clients, with or without a key."""
    METRICS = auto()
    """All clients with ``--metrics-without-key``, else all with a key."""
    USER = auto()
    """All clients with a key; all clients if the server asks for none."""
    CACHE = auto()
    """The admin key, the only key, or all clients if there are no keys, because their requests empty a cache as well.
    """
    ADMIN = auto()
    """The admin key or the only key. A server that was given neither draws an admin key at its start."""
    ROUTER_ADMIN = auto()
    """The admin key or the only key of the router itself. A router that has neither refuses the request.

    A router without keys passes requests of ``ADMIN`` on, and instances check the key. Nothing would check it for
    these.
    """

    @property
    def is_admins(self) -> bool:
        """Whether only an admin may use the path, whichever keys the server has."""
        return self in (Access.ADMIN, Access.ROUTER_ADMIN)


class AtRouter(Enum):
    """How a router serves a path."""

    NOT_FOUND = auto()
    """Answer 404: only instances have the path."""
    GENERATE = auto()
    """Send the request to a pair or a worker, and pass the answer on while it comes."""
    READ_PROMPT = auto()
    """Send the request to a prefill or a worker, which computes the prompt and answers. Nothing is handed over."""
    ASK_ONE = auto()
    """Pass on the answer of the first healthy instance."""
    OWN = auto()
    """Answer by the router's own endpoint of that name, which may ask every instance. ``router/app.py`` has them."""


class Server(Flag):
    """The servers that have a path."""

    INSTANCE = auto()
    ROUTER = auto()
    BOTH = INSTANCE | ROUTER


class PromptFields(NamedTuple):
    """Fields of a path's bodies that hold what the model reads. All others leave a router's choice as it is."""

    prompts: tuple[str, ...] = ()
    """Fields of which one is given: a prompt, or a list of them."""
    parts: tuple[str, ...] = ()
    """Fields that become parts of one prompt together, in that order, before ``prompts``."""


class PathFacts(NamedTuple):
    """Declaration of a path, known without an application."""

    path: str
    """Path as a Starlette route spells it. It has at most one parameter: as the last part, which takes the rest
    (``{name:path}``), or before a last segment (``{name:path}/cancel``).
    """
    methods: tuple[str, ...]
    """Methods that an endpoint implements. HEAD is answered wherever GET is, OPTIONS everywhere."""
    endpoint: str
    """Module in ``server/http/``, a colon, and the name of its ``HttpEndpoint``. The module is empty if only routers
    have the path.
    """
    does: str
    """Summary for the table of endpoints in docs/http-api.md."""
    at_router: AtRouter
    access: Access = Access.USER
    rid_prefix: str = ""
    """Prefix of the ids that requests without a ``rid`` get."""
    is_poll: bool = False
    """Whether programs ask every few seconds. Then it is neither logged above debug level nor refused under load."""
    ends_work: bool = False
    """Whether it ends work. Then it is not refused under load. ``RequestLimit`` says how far that goes."""
    starts_work: bool = False
    """Whether a GET makes the model compute."""
    error_shape: ErrorShape = plain_error
    """Form of the path's errors, whichever server and layer they come from."""
    stream_format: StreamFormat = OPENAI_STREAM
    """Framing of the path's streams."""
    id_headers: tuple[bytes, ...] = ()
    """Headers of an answer, beside ``x-request-id``, that have the request's id."""
    prompt_fields: PromptFields = PromptFields()
    """Prompts in the bodies of a path that a router chooses instances for."""
    choice_fields: tuple[str, ...] = ()
    """Fields of its bodies that say how many answers a prompt gets, or objects with ``n``, which does."""

    @property
    def only_reads(self) -> bool:
        """Whether a request changes nothing and costs little, so that it may be repeated."""
        return self.methods == GET and not self.starts_work

    @property
    def name(self) -> str:
        """Name of the endpoint, the part after the colon in ``endpoint``."""
        return self.endpoint.partition(":")[2]

    @property
    def module(self) -> str:
        """Module of the instance's endpoint in ``server/http/``; empty if instances do not have the path."""
        return self.endpoint.partition(":")[0]

    @property
    def servers(self) -> Server:
        """The servers that have the path."""
        if not self.module:
            return Server.ROUTER
        return Server.INSTANCE if self.at_router is AtRouter.NOT_FOUND else Server.BOTH

    @property
    def label(self) -> str:
        """Path in metrics: a parameter without its converter."""
        return self.path.replace(":path}", "}")

    @property
    def ends(self) -> tuple[str, str]:
        """Text before and after the parameter; the whole path and "" if there is none."""
        before, _, rest = self.path.partition("{")
        return before, rest.partition("}")[2]


class PathTable:
    """The paths of one server, found by what clients ask for."""

    def __init__(self, paths: Iterable[PathFacts]) -> None:
        self.paths = tuple(paths)
        self._exact: dict[str, tuple[PathFacts, ...]] = {}
        for facts in self.paths:
            if "{" not in facts.path:
                self._exact[facts.path] = (*self._exact.get(facts.path, ()), facts)
        self._open = tuple((*facts.ends, facts) for facts in self.paths if "{" in facts.path)

    def find(self, path: str, method: str = "") -> PathFacts | None:
        """Return the facts of a decoded request path; None for one that does not exist.

        Of several declarations, return one with the ``method`` (HEAD counts as GET), else the first. Slashes at the end
        don't count, except in a parameter. A path with dot segments or unprintable characters does not exist, because a
        check, a route and an instance might understand it differently.
        """
        found = self._all(path)
        wanted = "GET" if method == "HEAD" else method
        return next((facts for facts in found if wanted in facts.methods), found[0] if found else None)

    def methods(self, path: str) -> tuple[str, ...]:
        """Return the methods of a decoded request path that are not a 405, in the order of an ``Allow`` header.

        It is empty for a path that does not exist.
        """
        own = tuple(dict.fromkeys(method for facts in self._all(path) for method in facts.methods))
        return (*own, *(("HEAD",) if "GET" in own else ()), "OPTIONS") if own else ()

    def _all(self, path: str) -> tuple[PathFacts, ...]:
        found = self._exact.get(path) or self._exact.get(path.rstrip("/") or path[:1]) or ()
        if found or not is_plain(path):
            return found
        return tuple(
            facts
            for before, after, facts in self._open
            if len(path) > len(before) + len(after) and path.startswith(before) and path.endswith(after)
        )

    def canonical(self, facts: PathFacts, path: str) -> str:
        """Return ``path`` as an application's routes spell it. ``facts``: what ``find`` returned for it.

        Slashes at its end are removed unless it has a parameter.
        """
        return path if "{" in facts.path else facts.path


def is_plain(path: str) -> bool:
    """Return whether a decoded path has neither dot segments nor unprintable characters."""
    return path.isprintable() and DOT_SEGMENTS.isdisjoint(path.split("/"))
