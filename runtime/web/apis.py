"""Every HTTP path of instances and routers, declared once.

Everything else about paths derives from the declarations:

- the routes of instances and routers;
- access by keys, load limits, CORS, and errors before an endpoint is reached;
- the shape of errors, and the events with which streams end;
- labels of metrics;
- the OpenAPI page, and the table of endpoints in docs/http-api.md.

Add an API with one file in ``server/http/`` and one entry in ``APIS``. The file has the endpoints, each with the models
of its body and its answers (``server/http/endpoint.py``). The entry has what a router needs as well. Routers stand
below ``server/http/`` and import nothing of it, so an entry only names its endpoints, and instances import them.
"""

from __future__ import annotations

from itertools import chain

from .errors import ErrorShape, anthropic_error, llama_error, message_error, plain_error
from .moved_answer import MOVED_PATH
from .paths import DELETE, GET, GET_OR_POST, PATCH, POST, Access, AtRouter, PathFacts, PathTable, PromptFields, Server
from .sse import OPENAI_STREAM, StreamFormat

NOT_FOUND, ASK_ONE, OWN = AtRouter.NOT_FOUND, AtRouter.ASK_ONE, AtRouter.OWN
OPEN, METRICS, USER, CACHE, ADMIN = Access.OPEN, Access.METRICS, Access.USER, Access.CACHE, Access.ADMIN
ROUTER_ADMIN = Access.ROUTER_ADMIN

Api = tuple[PathFacts, ...]

OLLAMA_EMPTY = (
    b'{"model":"","created_at":"1970-01-01T00:00:0%dZ","message":{"role":"assistant","content":""},'
    b'"response":"","done":false}\n'
)
"""Line that adds nothing to an answer of either endpoint of Ollama's; its second tells one kind from another."""
OLLAMA_LINES = StreamFormat(
    before_error=b"",
    error_sign=b'{"error":',
    last_event=b"",
    content_type=b"application/x-ndjson",
    event_ends=(b"\n",),
    # Lines of JSON have no comments.
    keep_alive=OLLAMA_EMPTY % 0,
    progress=OLLAMA_EMPTY % 1,
    before_moved=b"moved: ",
    is_default=True,
)
"""Ollama's streams: a JSON object in each line."""
OLLAMA_RUNS = "Ollama is running"
"""Text of ``/``, which Ollama's clients compare."""
ANTHROPIC_STREAM = StreamFormat(
    before_error=b"event: error\ndata: ",
    error_sign=b"event: error\n",
    last_event=b"",
    keep_alive=b'event: ping\ndata: {"type":"ping"}\n\n',
)
"""Anthropic's streams: each event has a name."""
RESPONSES_STREAM = StreamFormat(
    before_error=b"event: error\ndata: ",
    error_sign=b"event: error\n",
    last_event=b"",
    # Numbers of events grow, and a router does not know the last one.
    error_start=b'{"type":"error","sequence_number":2147483647,',
)
LLAMA_STREAM = StreamFormat(last_event=b"")
"""llama-server's streams: the last event of each answer says that it is the last."""


def api(
    *paths: PathFacts,
    error_shape: ErrorShape = plain_error,
    stream_format: StreamFormat = OPENAI_STREAM,
    id_headers: tuple[bytes, ...] = (),
) -> Api:
    """Declare an API by its paths.

    ``error_shape`` is the shape of all their errors, ``stream_format`` the format of their streams. ``id_headers``:
    their headers for the request's id, beside the usual one.
    """
    return tuple(
        facts._replace(error_shape=error_shape, stream_format=stream_format, id_headers=id_headers) for facts in paths
    )


def get(
    path: str,
    endpoint: str,
    does: str,
    at_router: AtRouter,
    access: Access = USER,
    *,
    is_poll: bool = False,
    starts_work: bool = False,
) -> PathFacts:
    """Declare a path that is served for GET. The arguments are fields of ``PathFacts``."""
    return PathFacts(path, GET, endpoint, does, at_router, access, is_poll=is_poll, starts_work=starts_work)


def post(
    path: str,
    endpoint: str,
    does: str,
    at_router: AtRouter,
    access: Access = USER,
    *,
    rid_prefix: str = "",
    ends_work: bool = False,
) -> PathFacts:
    """Declare a path that is served for POST. The arguments are fields of ``PathFacts``."""
    return PathFacts(path, POST, endpoint, does, at_router, access, rid_prefix=rid_prefix, ends_work=ends_work)


def generate(
    path: str,
    endpoint: str,
    does: str,
    *,
    rid_prefix: str = "",
    prompts: tuple[str, ...] = (),
    parts: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
) -> PathFacts:
    """Declare a path that generates. ``prompts`` and ``parts`` are those of ``PromptFields``.

    ``choices``: ``PathFacts.choice_fields``.
    """
    facts = post(path, endpoint, does, AtRouter.GENERATE, rid_prefix=rid_prefix)
    return facts._replace(prompt_fields=PromptFields(prompts, parts), choice_fields=choices)


def read_prompt(
    path: str,
    endpoint: str,
    does: str,
    *,
    rid_prefix: str = "",
    prompts: tuple[str, ...] = (),
    parts: tuple[str, ...] = (),
) -> PathFacts:
    """Declare a path that answers with what the pass over a prompt gives. The arguments are those of ``generate``."""
    facts = post(path, endpoint, does, AtRouter.READ_PROMPT, rid_prefix=rid_prefix)
    return facts._replace(prompt_fields=PromptFields(prompts, parts))


def delete(path: str, endpoint: str, does: str, at_router: AtRouter, access: Access = USER) -> PathFacts:
    """Declare a path that is served for DELETE. The arguments are fields of ``PathFacts``."""
    return PathFacts(path, DELETE, endpoint, does, at_router, access)


def patch(path: str, endpoint: str, does: str, at_router: AtRouter, access: Access = USER) -> PathFacts:
    """Declare a path that is served for PATCH. The arguments are fields of ``PathFacts``."""
    return PathFacts(path, PATCH, endpoint, does, at_router, access)


NATIVE = generate(
    "/generate",
    "native.generate:generate",
    "generate, SGLang's native shape",
    prompts=("input_ids", "text"),
    choices=("sampling_params",),
)
"""The path with the engine's own form of bodies, as health checks send it."""

APIS: tuple[Api, ...] = (
    # State of the server
    api(
        get("/health", "status.health:health", "can it serve?", OWN, OPEN, is_poll=True),
        get("/readyz", "status.health:health", "can it serve?", OWN, OPEN, is_poll=True),
        get("/livez", "status.health:livez", "does this process answer?", OWN, OPEN, is_poll=True),
        get(
            "/health_generate",
            "status.health:health_generate",
            "does it really generate?",
            OWN,
            is_poll=True,
            starts_work=True,
        ),
        get("/ping", "status.health:health", "the same as `/health`", OWN, OPEN, is_poll=True)._replace(
            methods=GET_OR_POST
        ),
        get("/metrics", "status.health:metrics", "counts and latencies, for Prometheus", OWN, METRICS, is_poll=True),
        get("/metrics/targets", ":targets", "the instances, for Prometheus to scrape", OWN, METRICS, is_poll=True),
        get("/version", "status.info:version", "the server's version", ASK_ONE),
        get("/server_info", "status.info:server_info", "pools, queues, role, peers, options", OWN),
        get("/get_server_info", "status.info:server_info", "the same as `/server_info`", OWN),
        # Hand-overs name the requests of every key.
        get("/transfers", "status.info:transfers", "hand-overs that are open", OWN, ADMIN),
        get("/model_info", "status.info:model_info", "the model that is served, in SGLang's words", ASK_ONE),
        get("/get_model_info", "status.info:model_info", "the same as `/model_info`", ASK_ONE),
        get("/props", "status.info:props", "limits and template of the model, in llama-server's words", ASK_ONE),
    ),
    # SGLang's
    api(NATIVE),
    # OpenAI's
    api(
        generate(
            "/v1/completions",
            "openai.completions:completions",
            "generate, OpenAI's shape",
            rid_prefix="cmpl-",
            prompts=("prompt",),
            choices=("n",),
        ),
        generate(
            "/v1/chat/completions",
            "openai.chat:chat_completions",
            "answer a conversation, OpenAI's shape",
            rid_prefix="chatcmpl-",
            parts=("tools", "messages"),
            choices=("n",),
        ),
    ),
    # llama-server's
    api(
        generate(
            "/completion",
            "llama.completion:completion",
            "complete a prompt, llama-server's shape",
            prompts=("prompt",),
            choices=("n_cmpl",),
        ),
        generate(
            "/completions",
            "llama.completion:completion",
            "the same as `/completion`",
            prompts=("prompt",),
            choices=("n_cmpl",),
        ),
        error_shape=llama_error,
        stream_format=LLAMA_STREAM,
    ),
    # Ollama's
    api(
        get("/", "ollama.models:running", "does it run? for Ollama's clients", OWN, OPEN, is_poll=True),
        get("/api/version", "ollama.models:version", "the version of Ollama's API", ASK_ONE),
        get("/api/tags", "ollama.models:list_models", "the names of the model, as Ollama lists them", ASK_ONE),
        get("/api/ps", "ollama.models:list_running", "the model in memory, as Ollama lists it", ASK_ONE),
        post("/api/show", "ollama.models:show", "limits and capabilities of the model, Ollama's shape", ASK_ONE),
        generate(
            "/api/generate",
            "ollama.generate:generate",
            "answer a prompt, Ollama's shape",
            parts=("system", "prompt"),
        ),
        generate(
            "/api/chat",
            "ollama.generate:chat",
            "answer a conversation, Ollama's shape",
            parts=("tools", "messages"),
        ),
        error_shape=message_error,
        stream_format=OLLAMA_LINES,
    ),
    # Anthropic's
    api(
        generate(
            "/v1/messages",
            "anthropic.messages:messages",
            "answer a conversation, Anthropic's shape",
            rid_prefix="msg_",
            parts=("tools", "system", "messages"),
        ),
        post(
            "/v1/messages/count_tokens",
            "anthropic.count_tokens:count_tokens",
            "count a prompt's tokens, Anthropic's shape",
            ASK_ONE,
        ),
        error_shape=anthropic_error,
        stream_format=ANTHROPIC_STREAM,
        id_headers=(b"request-id",),
    ),
    # OpenAI's, with items and typed events
    api(
        generate(
            "/v1/responses",
            "responses.endpoints:create_response",
            "answer a conversation of items, OpenAI's Responses API",
            rid_prefix="resp_",
            parts=("tools", "instructions", "input"),
        ),
        get("/v1/responses/{id:path}", "responses.kept:get_response", "a response that is kept", OWN),
        post(
            "/v1/responses/{id:path}/cancel",
            "responses.kept:cancel_response",
            "end a running response",
            OWN,
            ends_work=True,
        ),
        delete("/v1/responses/{id:path}", "responses.kept:delete_response", "drop a response that is kept", OWN),
        stream_format=RESPONSES_STREAM,
    ),
    # Embeddings and scores
    api(
        read_prompt(
            "/v1/embeddings",
            "readouts.embeddings:embeddings",
            "embed texts, OpenAI's shape",
            rid_prefix="embd-",
            prompts=("input",),
        ),
        read_prompt(
            "/v1/score",
            "readouts.score:score",
            "probabilities of labels, or scores of pairs of texts",
            rid_prefix="score-",
            prompts=("items", "text_2"),
            parts=("query", "text_1"),
        ),
        read_prompt(
            "/v1/rerank",
            "readouts.rerank:rerank",
            "order documents by relevance, Jina's and Cohere's shape",
            rid_prefix="rerank-",
            prompts=("documents",),
            parts=("query",),
        ),
    ),
    # Ollama's embeddings
    api(
        read_prompt("/api/embed", "readouts.ollama:embed", "embed texts, Ollama's shape", prompts=("input",)),
        read_prompt(
            "/api/embeddings",
            "readouts.ollama:old_embeddings",
            "embed one text, Ollama's older shape",
            prompts=("prompt",),
        ),
        error_shape=message_error,
    ),
    # Text and tokens
    api(
        post("/tokenize", "text.models:tokenize", "from text to token ids", ASK_ONE),
        post("/detokenize", "text.models:detokenize", "from token ids to text", ASK_ONE),
        post("/apply-template", "text.models:apply_template", "the prompt that the chat template makes", ASK_ONE),
    ),
    # Running requests
    api(post("/abort_request", "generation.abort:abort_request", "end running requests", OWN, ends_work=True)),
    # Sessions
    api(
        get("/kv/sessions", "sessions.endpoints:list_sessions", "list the sessions", OWN),
        post("/kv/snapshot", "sessions.endpoints:snapshot", "save a request or a prompt as a session", OWN),
        post("/kv/restore", "sessions.endpoints:restore", "go on with a session", OWN),
        post(
            "/slots/{id:path}",
            "sessions.slots:slot_action",
            "save, restore or erase a session, for llama-server clients",
            OWN,
        ),
        delete("/kv/sessions/{name:path}", "sessions.endpoints:delete_session", "delete a session", OWN),
    ),
    # Orders to one instance
    api(
        post("/migrate", "admin.moving:migrate", "move a running request to another instance", NOT_FOUND, ADMIN),
        post("/drain", "admin.moving:drain", "finish or hand over what runs, and end", NOT_FOUND, ADMIN),
        post("/role", "admin.moving:role", "change the role", NOT_FOUND, ADMIN),
        # Another instance sends a ticket, which is the key to one answer.
        post(MOVED_PATH, "admin.moving:moved", "the rest of a moved answer, for other instances", NOT_FOUND, OPEN),
        post(
            "/release_memory_occupation",
            "admin.memory:release_memory",
            "give weights and KV memory back to the system",
            NOT_FOUND,
            ADMIN,
        ),
        post(
            "/resume_memory_occupation",
            "admin.memory:resume_memory",
            "take weights and KV memory again",
            NOT_FOUND,
            ADMIN,
        ),
        post("/kv/resize", "admin.memory:resize_pool", "a smaller KV pool, or a larger one", NOT_FOUND, ADMIN),
        post("/kv/hashes", "admin.kv_hashes:kv_hashes", "what the KV pool holds of a prompt", NOT_FOUND, ADMIN),
        post("/start_profile", "admin.profiling:start_profile", "trace what the workers compute", NOT_FOUND, ADMIN),
        post("/stop_profile", "admin.profiling:stop_profile", "end a trace before its time", NOT_FOUND, ADMIN),
        post("/flush_cache", "admin.cache:flush_cache", "drop cached prefixes", OWN, CACHE),
    ),
    # The instances of a router
    api(
        get("/workers", ":list_workers", "the router's instances, of all roles", OWN, ROUTER_ADMIN),
        post("/workers", ":add_worker", "add an instance", OWN, ROUTER_ADMIN),
        patch("/workers", ":change_worker", "cordon an instance, or send it requests again", OWN, ROUTER_ADMIN),
        delete("/workers", ":remove_worker", "drain an instance, and remove it", OWN, ROUTER_ADMIN),
    ),
    # The model, as OpenAI lists it
    api(
        get("/v1/models", "text.models:list_models", "the names of the model that is served", ASK_ONE),
        get("/v1/models/{name:path}", "text.models:get_model", "the model of that name", ASK_ONE),
    ),
    # Pages about this API
    api(
        get("/openapi.json", "pages.openapi:openapi_page", "the schemas of bodies and answers", ASK_ONE),
        get("/docs", "pages.docs_page:docs_page", "the same as a page for people", NOT_FOUND),
    ),
)
"""The APIs, in the order of the OpenAPI page, which shows GET before POST before DELETE."""
PATHS = tuple(chain.from_iterable(APIS))


def path_table(server: Server) -> PathTable:
    """Return the table of the paths that ``server`` has."""
    return PathTable(facts for facts in PATHS if server in facts.servers)
