"""The HTTP paths of instances and routers: one table that access checks, routing, metrics labels and CORS all read.

A path that is not in the table does not exist: it is a 404, whatever an application has routes for.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, Flag, auto
from typing import NamedTuple

DOT_SEGMENTS = frozenset({".", ".."})
GET, POST, DELETE = ("GET",), ("POST",), ("DELETE",)


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


class Server(Flag):
    """The servers that have a path."""

    INSTANCE = auto()
    ROUTER = auto()
    BOTH = INSTANCE | ROUTER


class PathFacts(NamedTuple):
    """Facts about a path, known without an application."""

    path: str
    """Path as a Starlette route spells it. A parameter is the last segment and takes the rest (``{name:path}``)."""
    methods: tuple[str, ...]
    """Methods that an endpoint implements. HEAD is answered wherever GET is, OPTIONS everywhere."""
    access: Access
    servers: Server = Server.BOTH
    is_poll: bool = False
    """Whether programs ask every few seconds. Then it is neither logged above debug level nor refused under load."""
    ends_work: bool = False
    """Whether it ends work. Then it is not refused under load. ``RequestLimit`` says how far that goes."""
    starts_work: bool = False
    """Whether a GET makes the model compute."""

    @property
    def only_reads(self) -> bool:
        """Whether a request changes nothing and costs little, so that it may be repeated."""
        return self.methods == GET and not self.starts_work

    @property
    def label(self) -> str:
        """Path in metrics: a parameter without its converter."""
        return self.path.replace(":path}", "}")

    @property
    def answered_methods(self) -> tuple[str, ...]:
        """The methods that are not a 405, in the order of an ``Allow`` header."""
        head = ("HEAD",) if "GET" in self.methods else ()
        return (*self.methods, *head, "OPTIONS")


PATHS = (
    PathFacts("/health", GET, Access.OPEN, is_poll=True),
    PathFacts("/readyz", GET, Access.OPEN, is_poll=True),
    PathFacts("/livez", GET, Access.OPEN, is_poll=True),
    PathFacts("/metrics", GET, Access.METRICS, is_poll=True),
    PathFacts("/metrics/targets", GET, Access.METRICS, Server.ROUTER, is_poll=True),
    PathFacts("/health_generate", GET, Access.USER, is_poll=True, starts_work=True),
    PathFacts("/generate", POST, Access.USER),
    PathFacts("/v1/completions", POST, Access.USER),
    PathFacts("/v1/chat/completions", POST, Access.USER),
    PathFacts("/v1/models", GET, Access.USER),
    PathFacts("/v1/models/{name:path}", GET, Access.USER),
    PathFacts("/tokenize", POST, Access.USER),
    PathFacts("/detokenize", POST, Access.USER),
    PathFacts("/model_info", GET, Access.USER),
    PathFacts("/get_model_info", GET, Access.USER),
    PathFacts("/server_info", GET, Access.USER),
    PathFacts("/get_server_info", GET, Access.USER),
    PathFacts("/abort_request", POST, Access.USER, ends_work=True),
    PathFacts("/kv/sessions", GET, Access.USER),
    PathFacts("/kv/sessions/{name:path}", DELETE, Access.USER),
    PathFacts("/kv/snapshot", POST, Access.USER),
    PathFacts("/kv/restore", POST, Access.USER),
    PathFacts("/slots/{id:path}", POST, Access.USER),
    PathFacts("/openapi.json", GET, Access.USER),
    PathFacts("/docs", GET, Access.USER, Server.INSTANCE),
    # Hand-overs name the requests of every key.
    PathFacts("/transfers", GET, Access.ADMIN),
    PathFacts("/flush_cache", POST, Access.CACHE),
    PathFacts("/kv/resize", POST, Access.ADMIN, Server.INSTANCE),
    PathFacts("/kv/hashes", POST, Access.ADMIN, Server.INSTANCE),
    PathFacts("/start_profile", POST, Access.ADMIN, Server.INSTANCE),
    PathFacts("/stop_profile", POST, Access.ADMIN, Server.INSTANCE),
    PathFacts("/release_memory_occupation", POST, Access.ADMIN, Server.INSTANCE),
    PathFacts("/resume_memory_occupation", POST, Access.ADMIN, Server.INSTANCE),
    PathFacts("/migrate", POST, Access.ADMIN, Server.INSTANCE),
    PathFacts("/drain", POST, Access.ADMIN, Server.INSTANCE),
    PathFacts("/role", POST, Access.ADMIN, Server.INSTANCE),
    # Another instance sends a ticket, which is the key to one answer.
    PathFacts("/moved", POST, Access.OPEN, Server.INSTANCE),
)


class PathTable:
    """The paths of one server, found by what clients ask for."""

    def __init__(self, paths: Iterable[PathFacts]) -> None:
        self.paths = tuple(paths)
        self._exact = {facts.path: facts for facts in self.paths if "{" not in facts.path}
        self._prefixes = tuple((facts.path.partition("{")[0], facts) for facts in self.paths if "{" in facts.path)

    @staticmethod
    def of(server: Server, paths: Iterable[PathFacts] = PATHS) -> PathTable:
        """Return the table of the paths that ``server`` has."""
        return PathTable(facts for facts in paths if server in facts.servers)

    def find(self, path: str) -> PathFacts | None:
        """Return the facts of a decoded request path; None for one that does not exist.

        Slashes at the end don't count, except in a parameter. A path with dot segments or unprintable characters does
        not exist, because a check, a route and an instance might understand it differently.
        """
        facts = self._exact.get(path) or self._exact.get(path.rstrip("/"))
        if facts is not None or not is_plain(path):
            return facts
        return next((facts for prefix, facts in self._prefixes if path.startswith(prefix) and path != prefix), None)

    def canonical(self, facts: PathFacts, path: str) -> str:
        """Return a ``path`` that ``find`` found as an application's routes know it."""
        return path if "{" in facts.path else facts.path


def is_plain(path: str) -> bool:
    """Return whether a decoded path has neither dot segments nor unprintable characters."""
    return path.isprintable() and DOT_SEGMENTS.isdisjoint(path.split("/"))
