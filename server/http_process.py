"""The HTTP process: listens, checks requests, passes them to the tokenizer and answers with what the detokenizer sends.

bind → serve, receive → (STOP) fail what still waits with a 503 → close connections → exit 0
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import asyncio
import logging
import socket
import sys

import uvloop
import zmq.asyncio

from ..messages.channel import AsyncReceiver, Sender
from ..messages.error_codes import INSTANCE_FAILED
from ..messages.routes import ToHttp
from ..model_files.errors import ModelError
from ..model_files.text.errors import TokenizerLoadError
from ..runtime.answer_keys import AnswerKeys
from ..runtime.child import ChildContext, start_child
from ..runtime.cluster_secret import ClusterSecret
from ..runtime.malloc import return_freed_memory
from ..runtime.rlimits import allow_many_connections
from ..runtime.signals import FAILED, STOP
from ..runtime.web.cluster_auth import OPEN_CLUSTER, ClusterClient
from ..runtime.web.keys import caches_by_key
from ..runtime.web.own_admin_key import own_admin_key
from ..runtime.web.ports import listen
from ..runtime.web.responses.response_files import ResponseFolderError
from ..runtime.web.server import ChildServer, server_config
from .http.app import make_app
from .http.engine.engine_client import EngineClient
from .http.served_model import ServedModel
from .http.session_store.session_files import SessionError
from .http.session_store.session_folder import open_sessions
from .options import ServerOptions

BACKLOG = 2048
CLOSE_TIMEOUT_SECONDS = 1
log = logging.getLogger(__name__)
OPTIONS = ServerOptions


async def serve(ctx: ChildContext[ServerOptions], listener: socket.socket, model: ServedModel) -> None:
    """Serve HTTP on ``listener`` until ``STOP`` or ``FAILED``, which end all open requests with an error.

    ``model``: what the API says of the served model. An exception of the task that receives messages is raised at once.
    """
    receiver: AsyncReceiver[ToHttp] = AsyncReceiver(zmq.asyncio.Context(ctx.zmq_ctx), ctx.address("http"), ToHttp)
    sender = Sender(ctx.zmq_ctx, ctx.address("tokenizer"))
    supervisor = Sender(ctx.zmq_ctx, ctx.address("supervisor"))
    options = ctx.options
    secret = ClusterSecret.read(options.cluster_secret_file)
    engine = EngineClient(
        sender,
        supervisor,
        options.disaggregation_mode,
        cache_by_key=caches_by_key(options),
        answer_keys=AnswerKeys(ctx.secret),
        cluster=ClusterClient(secret) if secret is not None else OPEN_CLUSTER,
        max_logprobs=options.max_logprobs_per_request,
        max_requests=options.max_queued_requests + options.max_running_requests,
    )
    config = server_config(
        make_app(options, engine, ctx.epoch, model, own_admin_key(ctx.run_dir)),
        options,
        log_level="error",  # it warns of each request that is none: any stranger could fill the log
        timeout_graceful_shutdown=CLOSE_TIMEOUT_SECONDS,
    )

    def started() -> None:
        host, port = listener.getsockname()[:2]
        log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        ctx.report_ready()

    server = ChildServer(config, started)

    def stop(what: str, code: str | None) -> None:
        engine.close(f"{what}, and this request with it; send it again, to another one where there is one", code)
        server.should_exit = True

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(STOP, stop, "the instance stops", None)
    loop.add_signal_handler(FAILED, stop, "a process of the instance died: the instance stops", INSTANCE_FAILED)
    receiving = asyncio.create_task(engine.run(receiver))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait([receiving, serving], return_when=asyncio.FIRST_COMPLETED)
    if receiving.done():
        receiving.result()
    receiving.cancel()
    await serving
    receiver.close()
    sender.close()
    supervisor.close()


def main() -> None:
    """Run the HTTP process of an instance until it is told to stop.

    Exits with an error if it can't listen, or can't read the model's files or the sessions.
    """
    ctx = start_child(sys.argv, OPTIONS)
    return_freed_memory()
    allow_many_connections()
    host, port = ctx.options.host, ctx.options.port
    try:
        listener = listen(host, port, BACKLOG)
    except OSError as e:
        log.error("can't listen on %s:%d: %s; choose another --host or --port", host, port, e.strerror or e)
        sys.exit(1)
    try:
        model = ServedModel.read(ctx.options)
        open_sessions(ctx.options)
    except (ModelError, SessionError, TokenizerLoadError) as e:
        sys.exit(f"http: {e}")
    try:
        uvloop.run(serve(ctx, listener, model))
    except ResponseFolderError as e:
        sys.exit(f"http: {e}")


if __name__ == "__main__":
    main()
