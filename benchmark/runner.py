"""Sends a workload and writes down what comes back.

A run: warm up → send until the groups end → wait for what is under way → done. Every request that was sent leaves one
record, whatever became of it.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .backends import Backend
from .errors import RequestError, ServerError
from .http_client import HttpClient
from .prompts import RequestSpec
from .record import RequestRecord, StreamRecorder
from .workload import LoadGroup, Workload


@dataclass(frozen=True)
class RunResult:
    """What one run left. ``window``: seconds that rates are taken over; ``cpu_seconds``: this process's own."""

    workload: Workload
    records: list[RequestRecord]
    window: float
    cpu_seconds: float


class LoadRunner:
    """Runs one workload at a time. ``on_progress`` is called with each finished record."""

    def __init__(
        self,
        client: HttpClient,
        backend: Backend,
        request_timeout: float,
        drain_timeout: float,
        on_progress: Callable[[RequestRecord], None],
    ) -> None:
        self._client = client
        self._backend = backend
        self._request_timeout = request_timeout
        self._drain_timeout = drain_timeout
        self._on_progress = on_progress
        self._origin = 0.0
        self._records: list[RequestRecord] = []

    async def warm_up(self, workload: Workload) -> None:
        """Send the warm-up requests and wait for their answers; raises ``ServerError`` if one fails.

        As many are under way at a time as the load allows, or all of them. They leave no trace in the results.
        """
        self._origin = self._client.clock()
        limit = asyncio.Semaphore(workload.load.concurrency or max(1, len(workload.warmup)))

        async def one(spec: RequestSpec) -> None:
            async with limit:
                record = await self._send(spec, "warm-up", 0.0)
            if record.error:
                raise ServerError(f"a warm-up request failed: {record.error}")

        try:
            async with asyncio.TaskGroup() as tasks:
                for spec in workload.warmup:
                    tasks.create_task(one(spec))
        except* ServerError as group:
            raise group.exceptions[0] from None

    async def run(self, workload: Workload) -> RunResult:
        """Send all requests of ``workload``, wait for the answers, and return a record of each, failed ones included.

        A scenario's unfinished requests are cancelled after its duration and the drain timeout.
        """
        self._records = []
        with _no_garbage_collection():
            cpu = time.process_time()
            self._origin = self._client.clock()
            senders = [asyncio.create_task(self._send_group(group)) for group in workload.groups]
            limit = workload.duration + self._drain_timeout
            _, unfinished = await asyncio.wait(senders, timeout=None if math.isinf(limit) else limit)
            for sender in unfinished:
                sender.cancel()
            ended = await asyncio.gather(*senders, return_exceptions=True)
            cpu = time.process_time() - cpu
        for outcome in ended:
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome
        last = max((record.ended for record in self._records), default=0.0)
        first = min((record.sent for record in self._records), default=0.0)
        window = last - first if math.isinf(workload.duration) else workload.duration
        return RunResult(workload, self._records, window, cpu)

    async def _send_group(self, group: LoadGroup) -> None:
        if group.arrivals is None:
            await self._closed_loop(group)
        else:
            await self._open_loop(group, group.arrivals)

    async def _closed_loop(self, group: LoadGroup) -> None:
        await self._sleep_until(group.start)

        async def one_client() -> None:
            while self._now() < group.end and (spec := next(group.requests, None)) is not None:
                await self._send(spec, group.name, self._now())

        async with asyncio.TaskGroup() as clients:
            for _ in range(group.concurrency or 1):
                clients.create_task(one_client())

    async def _open_loop(self, group: LoadGroup, arrivals: Iterator[float]) -> None:
        limit = asyncio.Semaphore(group.concurrency) if group.concurrency else None

        async def one(spec: RequestSpec, due: float) -> None:
            if limit is None:
                await self._send(spec, group.name, due)
                return
            async with limit:
                await self._send(spec, group.name, due)

        async with asyncio.TaskGroup() as tasks:
            for spec, due in zip(group.requests, arrivals, strict=False):
                if due >= group.end:
                    break
                await self._sleep_until(due)
                tasks.create_task(one(spec, due))

    async def _send(self, spec: RequestSpec, group: str, due: float) -> RequestRecord:
        body = self._backend.body(spec)
        record = RequestRecord(group, due, spec.output_len, spec.input_len)
        recorder = StreamRecorder(record, self._backend.reader(), self._origin)
        self._records.append(record)
        record.sent = self._now()
        try:
            async with asyncio.timeout(self._request_timeout):
                await self._client.post_stream(self._backend.path, body, recorder)
            recorder.finish()
        except RequestError as e:
            record.error = str(e)
        except TimeoutError:
            record.error = f"not complete after {self._request_timeout:g} s"
        except asyncio.CancelledError:
            record.error = "not complete when the run ended"
            raise
        finally:
            record.ended = self._now()
            self._on_progress(record)
        return record

    def _now(self) -> float:
        return self._client.clock() - self._origin

    async def _sleep_until(self, at: float) -> None:
        delay = at - self._now()
        if delay > 0:
            await asyncio.sleep(delay)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off in the block. Its pauses of milliseconds would count as the server's time."""
    by_others = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not by_others:
            gc.unfreeze()
