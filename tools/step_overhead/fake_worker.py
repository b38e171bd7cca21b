"""A model worker without a model, in the place of ``model_runner/process.py`` when the rest of an instance is measured.

Channels and messages are the same. A step takes a given CPU time, as a forward pass would, and gives token ids without
meaning. The begin and duration of each step are recorded for questions on the channel ``QUESTIONS``. A thread of its
own answers there; it sleeps while steps are measured.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from typing import Any, NoReturn

import msgspec
import numpy as np
import zmq

from pdserve.messages.channel import Receiver, Sender
from pdserve.messages.routes import ToWorker
from pdserve.messages.worker import ForwardStep, KVGroup, KVLayout, StepResult, WorkerCommand, WorkerReady
from pdserve.model_files.context_length import choose_context_length
from pdserve.model_files.model_path import resolve_model
from pdserve.model_files.spec_reader import read_spec
from pdserve.model_runner.options import WorkerOptions
from pdserve.runtime.child import ChildContext, start_child

QUESTIONS = "fake_worker"
POOL_TOKENS = 1 << 22
TOKEN_IDS = (1000, 30000)
"""Range of the ids to answer with: plain words in any vocabulary of today."""
GATHER_SECONDS = 0.02
"""Minimum seconds of a step outside the measured batch.

HTTP needs a while to take in that many requests. Without this, the first would end before the last has arrived.
"""


class Occupy(msgspec.Struct, tag=True, frozen=True):
    """From now on a step that decodes ``batch`` requests, and nothing else, takes ``step_seconds`` of CPU time.

    What was recorded is forgotten. Answered by an empty frame.
    """

    batch: int
    step_seconds: float


class Report(msgspec.Struct, tag=True, frozen=True):
    """What has been recorded since ``Occupy``? Answered by ``StepRecord``."""


class StepRecord(msgspec.Struct, frozen=True):
    """Steps in order. ``starts``: ``time.perf_counter()`` when each began (float64).

    ``busy``: CPU seconds that it took (float64), 0 for one that is not of the batch. ``sampled`` counts the tokens that
    were given out in all of them.
    """

    starts: bytes
    busy: bytes
    sampled: int


class FakeModel:
    """Model that runs steps by staying awake. CPU time counts, because another process delays a forward pass, too."""

    def __init__(self) -> None:
        self._ids = np.random.default_rng(0).integers(*TOKEN_IDS, size=1 << 16, dtype=np.int32)
        self._at = 0
        self.occupy(0, 0.0)

    def occupy(self, batch: int, step_seconds: float) -> None:
        """Set the CPU time of a step that decodes ``batch`` rows to ``step_seconds``, and start a new record."""
        self._batch, self._step_seconds = batch, step_seconds
        self._starts, self._busy = array("d"), array("d")
        self._sampled = 0

    def run(self, step: ForwardStep) -> StepResult:
        """Return a step's result with meaningless token ids, after the set CPU time, and record the step.

        A step that is not a decode of the whole batch sleeps instead, and counts as not busy.
        """
        started, cpu = time.perf_counter(), time.thread_time()
        count = int(np.count_nonzero(np.frombuffer(step.sample, dtype="<i4")))
        if self._at + count > len(self._ids):
            self._at = 0
        ids = self._ids[self._at : self._at + count].tobytes()
        self._at += count
        self._starts.append(started)
        self._sampled += count
        if len(step.rows) == len(step.input_ids) == 4 * self._batch:
            busy = time.thread_time() - cpu
            while busy < self._step_seconds:
                busy = time.thread_time() - cpu
            self._busy.append(busy)
        else:
            time.sleep(max(self._step_seconds, GATHER_SECONDS))
            self._busy.append(0.0)
        return StepResult(step.step_id, ids, (time.perf_counter() - started) * 1000)

    def record(self) -> StepRecord:
        """Return the start and busy times of all steps since ``occupy``. Call it between steps, never during one."""
        return StepRecord(self._starts.tobytes(), self._busy.tobytes(), self._sampled)


def answer_questions(ctx: ChildContext[WorkerOptions], model: FakeModel) -> NoReturn:
    """Answer questions on the channel ``QUESTIONS`` for ever: set the time of steps, or return their record."""
    socket: zmq.Socket[Any] = ctx.zmq_ctx.socket(zmq.REP)
    socket.bind(ctx.address(QUESTIONS))
    decoder = msgspec.msgpack.Decoder(Occupy | Report)
    while True:
        question = decoder.decode(socket.recv())
        if isinstance(question, Occupy):
            model.occupy(question.batch, question.step_seconds)
            socket.send(b"")
        else:
            socket.send(msgspec.msgpack.encode(model.record()))


def ready_message(options: WorkerOptions) -> WorkerReady:
    """Return the worker's ready message, with a KV pool that never runs short, for the model of the options.

    Loads no weights. Raises ``ModelError``.
    """
    spec = read_spec(resolve_model(options.model_path, weights=False))
    layers, size = tuple(range(spec.num_layers)), options.page_size
    page_bytes = spec.num_layers * size * spec.kv_elements * 4
    group = KVGroup(
        layers, "mha" if spec.latent_dim is None else "mla", spec.num_kv_heads, spec.head_dim, "float32", page_bytes
    )
    return WorkerReady(
        fingerprint="fake",
        vocab_size=spec.vocab_size,
        context_length=choose_context_length(spec, options.context_length),
        max_total_tokens=options.max_total_tokens or POOL_TOKENS,
        layout=KVLayout(size, (group,)),
        device="cpu",
        attention_backend="fake",
        weights_dtype="float32",
        backend_metadata=b"",
        load_seconds={},
    )


def main() -> NoReturn:
    """Run the fake model worker: answer each step that the scheduler sends, until the process is killed."""
    ctx = start_child(sys.argv, WorkerOptions)
    receiver: Receiver[WorkerCommand] = Receiver(ctx.zmq_ctx, ctx.address("worker"), ToWorker)
    events = Sender(ctx.zmq_ctx, ctx.address("worker_events"))
    model = FakeModel()
    threading.Thread(target=answer_questions, args=(ctx, model), daemon=True).start()
    events.send(ready_message(ctx.options))
    ctx.report_ready()
    while True:
        for command in receiver.recv(-1):
            if not isinstance(command, ForwardStep):
                raise TypeError(f"a fake worker hands nothing over, but was sent {type(command).__name__}")
            events.send(model.run(command))


if __name__ == "__main__":
    main()
