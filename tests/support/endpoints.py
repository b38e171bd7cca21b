"""The endpoints of instances, by path, as they are declared."""

from __future__ import annotations

from typing import Any

from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import GET, AtRouter
from pdserve.server.http.app import load_endpoint

ENDPOINTS = {facts: load_endpoint(facts) for facts in PATHS if facts.module}
QUESTIONS = {facts.path: found.answer for facts, found in ENDPOINTS.items() if found.answer and facts.methods == GET}
BODY_MODELS = {facts.path: found.body for facts, found in ENDPOINTS.items() if found.body}
"""Model of the body of each path that takes one."""
ANSWERS = {facts.path: found.answer for facts, found in ENDPOINTS.items() if found.answer and found.body}
STREAMS = {facts.path: found.event for facts, found in ENDPOINTS.items() if found.event}
"""Model of one event of each path with streamed answers."""
GENERATION_PATHS = tuple(facts.path for facts in PATHS if facts.at_router is AtRouter.GENERATE)

_USER = {"role": "user", "content": "a"}
GENERATION_BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [_USER]},
    "/completion": {"prompt": "a"},
    "/completions": {"prompt": "a"},
    "/api/generate": {"prompt": "a"},
    "/api/chat": {"messages": [_USER]},
    "/v1/messages": {"messages": [_USER], "max_tokens": 9},
    "/v1/responses": {"input": "a"},
}
"""The smallest body of each path that generates."""
