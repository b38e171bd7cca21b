"""An instance of a world: the real scheduler, ``KVManager`` with its peers, and transfer engine, over a simulated
model, with simulated sockets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from pdserve.disaggregation.bootstrap.registration import Reached, Registration
from pdserve.disaggregation.bootstrap.registry import Registry
from pdserve.disaggregation.errors import NotRegistered, RegistrationConflict
from pdserve.disaggregation.handover.kv_manager import KVManager
from pdserve.disaggregation.transfer import push_queue, received_pages
from pdserve.disaggregation.transfer.engine import TransferEngine
from pdserve.mem_cache.kv_pages.page_group import PageGroup
from pdserve.messages.base import Message
from pdserve.messages.channel import encode
from pdserve.messages.kv_debug import HashPages, PagesHashed
from pdserve.messages.memory import PoolTrimmed, ResizeReq, ResizeResult, TrimPool
from pdserve.messages.moves import MigrateReq, MigrateResult, ReqArrived, ReqMoved
from pdserve.messages.outputs import FinishType, ReqError, ReqTokens, TokenBatch
from pdserve.messages.question import RefusedAnswer
from pdserve.messages.requests import AbortReq, Bootstrap, GenerateReq, StopReq
from pdserve.messages.worker import ForwardStep, PagesVerified, StepResult, TransferEvent
from pdserve.runtime.disaggregation_options import DisaggregationMode
from pdserve.scheduler import scheduler as scheduler_module
from pdserve.scheduler.estimates.cost_model import CostModel
from pdserve.scheduler.estimator import Estimator
from pdserve.scheduler.features.pool_resize import PoolResize
from pdserve.scheduler.first_token import NOTHING, Load
from pdserve.scheduler.handlers import Handlers
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.req import Req
from pdserve.scheduler.scheduler import Scheduler
from support.phases import phases_problem
from support.sim import NO_WINDOW, Sent, SimWindow, SimWorker, logprob_of, make_generate, make_worker_ready
from support.sim_machine import Curve, measured_by, shape_of
from support.world.sim_backend import SimBackend, SimRegion
from support.world.sim_port import SimPort
from support.world.world import Violation, World

HOST = "127.0.0.1"
COST_MODEL = CostModel([], 0.0)


class Stopped(NamedTuple):
    """The end of a request after the detokenizer found a stop string in its output."""

    rid: str


class SimNetwork:
    """What ``Network`` is to a ``KVManager``. The bootstrap server at ``bootstrap_port`` outlives the instance."""

    def __init__(self, world: World, node: Node, bootstrap_port: int) -> None:
        self.bootstrap_port = bootstrap_port
        self.port = SimPort(world, HOST, node.turn)
        self.registration: Registration | None = None
        self._world = world
        self._node = node
        self._found: list[tuple[str, int, Reached | str]] = []

    def find(self, host: str, port: int) -> None:
        """See ``Network``."""
        self._world.post(("find", self._node.epoch), f"{self._node.epoch} asks :{port}", lambda: self._ask(host, port))

    def take_found(self) -> list[tuple[str, int, Reached | str]]:
        """See ``Network``."""
        found, self._found = self._found, []
        return found

    def register(self, registration: Registration) -> None:
        """See ``Network``."""
        self.registration = registration
        self.renew()

    def renew(self) -> None:
        """Keep the lease."""
        if self.registration is not None:
            registries = self._world.registries
            clock = lambda: self._world.now  # noqa: E731
            registry = registries.setdefault((HOST, self.bootstrap_port), Registry(clock))
            try:
                registry.register(self.registration)
            except RegistrationConflict:
                raise Violation(f"{self._node.epoch} lost its registration though nobody took it") from None

    def withdraw(self) -> None:
        """See ``Network``."""
        assert self.registration is not None
        self._world.registries[HOST, self.bootstrap_port].withdraw(self.registration.epoch)
        self.registration = None

    def pause(self) -> None:
        """See ``Network``."""
        assert self.registration is not None
        self._world.registries[HOST, self.bootstrap_port].withdraw(self.registration.epoch, for_now=True)
        self.registration = None

    def lost(self, now: float) -> str | None:
        """See ``Network``."""
        return None

    def _ask(self, host: str, port: int) -> None:
        registry = self._world.registries.get((host, port))
        try:
            if registry is None:
                raise NotRegistered("it does not answer")
            answer: Reached | str = Reached(registry.current(), host)
        except NotRegistered as e:
            answer = str(e)
        self._found.append((host, port, answer))
        self._node.turn()


class Whim(Estimator):
    """Expects whatever ``foresees`` says."""

    def __init__(self, scheduler: Scheduler, foresees: Callable[[Req], float]) -> None:
        super().__init__(COST_MODEL, scheduler.planner, scheduler.memory, scheduler.reqs, (), lambda: scheduler.longest)
        self._foresees = foresees

    def first_token_ms(self, req: Req, uncached: int, now: float, expected: Load = NOTHING) -> float:
        """See ``Estimator``."""
        return self._foresees(req)


class Pipe:
    """A channel between two processes of an instance: each message arrives by itself."""

    def __init__(self, world: World, node: Node, name: str) -> None:
        self._world = world
        self._node = node
        self._name = name

    def send(self, *messages: Message) -> None:
        """See ``Sender``."""
        node = self._node
        for message in messages:
            what = f"{node.epoch} {self._name} {type(message).__name__}"
            act = functools.partial(node.obey, message)
            self._world.post((self._name, node.epoch), what, act, encode([message]))


class Node:
    """One life of an instance. Its mode is that of ``options``.

    ``foresees``: how many milliseconds a prompt will take here, None: always none. ``machine``: milliseconds of a step;
    the cost model then learns from them, as a real one does. None: steps cost nothing, and nothing is learned.
    """

    def __init__(
        self,
        world: World,
        epoch: str,
        bootstrap_port: int,
        options: Any,
        *,
        lets_go: bool = False,
        hostile: bool = False,
        sealed: bool = False,
        window: SimWindow = NO_WINDOW,
        foresees: Callable[[Req], float] | None = None,
        machine: Curve | None = None,
    ) -> None:
        self.world = world
        self.epoch = epoch
        self.options = options
        self.alive = True
        self.frozen = self.worker_frozen = False
        """Whether its scheduler, and its worker, hang."""
        self.sim_worker = SimWorker(options, window=window)
        self.backend = SimBackend(world, epoch, self.work, lets_go=lets_go, hostile=hostile)
        regions: list[Any] = [SimRegion(kv) for kv in self.sim_worker.pools()]
        self._machine = machine
        said = make_worker_ready(options, window=window, measured=measured_by(machine) if machine is not None else ())
        groups = [PageGroup.of(group, region) for group, region in zip(said.layout.groups, regions, strict=True)]
        self.engine = TransferEngine(
            *(self.backend, groups, epoch, HOST, self._emit),
            layout=said.layout,
            clock=lambda: world.now,
        )
        ready = msgspec.structs.replace(said, backend_metadata=self.engine.metadata)
        self._to_detokenizer = Sent()
        outbox = Outbox(Pipe(world, self, "worker"), self._to_detokenizer, Pipe(world, self, "transfer"))
        # Without a machine nothing is estimated, and the first fit takes longer than most worlds.
        make = scheduler_module.make_cost_model if machine is not None else lambda worker: COST_MODEL
        with patch.object(scheduler_module, "make_cost_model", make):
            self.scheduler = Scheduler(options, ready, outbox)
        if foresees is not None:
            self.scheduler.estimator = Whim(self.scheduler, foresees)
        self.network = SimNetwork(world, self, bootstrap_port)
        self.network.port.is_sealed = self.sealed = sealed
        network: Any = self.network
        self.manager = KVManager(epoch, self.scheduler, network)
        self.scheduler.handovers = self.manager
        self.pool_resize = PoolResize(self.scheduler)
        self.mismatches = 0
        """Number of hand-overs with KV that was not what had been sent."""
        self.tokens: dict[str, list[int]] = {}
        self.pool_sizes = [(world.now, self.scheduler.memory.pool.max_total_tokens)]
        """Sizes of the KV pool in tokens, each with the time from which it holds."""
        self.sizes: list[ResizeResult | RefusedAnswer] = []
        """What became of the sizes that were asked for here."""
        self.move_answers: list[MigrateResult | RefusedAnswer] = []
        """How moves that were asked for here went."""
        self._moves: set[int] = set()
        """Numbers of the questions about them."""
        self._hung = False
        """Whether it hung since its last turn: what it has to say may be older than this turn."""
        self.arrivals: dict[str, float] = {}
        """When requests came, by the clock of their account of phases."""
        self.waits: dict[str, float] = {}
        """Seconds from a request's arrival to its first token or, if that comes first, to its end."""
        self.ended_at: dict[str, float] = {}
        self.forks: set[str] = set()
        """Further answers to a prompt. The prefill leg of a fork ends without a token."""
        self.scored: set[str] = set()
        """Requests with an answer that has the log-probability of each token."""
        self.spoils: Callable[[ForwardStep], list[int]] = lambda step: []
        """Function that returns the entries of a step with logits that are not finite."""
        self.turned: Callable[[Node], None] = lambda node: None
        """Called after each turn of the scheduler's loop."""
        self.computes_in_no_time = False
        """Whether time passes in this world, but not while a step is computed."""
        self.open: set[str] = set()
        """Requests that are to end yet."""
        self.manager.membership.register()

    # --- the scheduler's process ---

    def turn(self) -> None:
        """Run one tick of the scheduler's loop, and those that follow it at once."""
        self._turn()
        while self.alive and not self.frozen and self.scheduler.has_freed:
            self._turn()

    def _turn(self) -> None:
        if not self.alive or self.frozen:
            self._hung = True
            return
        now, scheduler = self.world.now, self.scheduler
        scheduler.now = now
        self.manager.poll(now)
        self.pool_resize.tick(now)
        self._note_pool_size()
        scheduler.run_steps(now)
        self.manager.flush()
        scheduler.outbox.flush()
        if self._machine is not None:
            scheduler.catch_up()
        self._hear()
        self._hung = False
        self.turned(self)

    def submit(self, rid: str, prompt: list[int], room: int, bootstrap_port: int, **kwargs: Any) -> None:
        """Submit a client's leg of a request. ``bootstrap_port`` is that of its prefill."""
        msg = make_generate(rid, prompt, room=room, **kwargs)
        msg = msgspec.structs.replace(
            msg, bootstrap=Bootstrap(HOST, bootstrap_port, room, trusted=self.sealed), arrival=self.world.now
        )
        self.admit(msg)

    def admit(self, *messages: GenerateReq) -> None:
        """Take requests in, several answers to one prompt at once."""
        for msg in messages:
            self.open.add(msg.rid)
            self.arrivals[msg.rid] = self.world.now
            if msg.fork_of:
                self.forks.add(msg.rid)
            if msg.logprobs is not None:
                self.scored.add(msg.rid)
            self.scheduler.arrivals.admit(msg, self.world.now)
        self.turn()

    def stop(self, rid: str) -> None:
        """Let the detokenizer find a stop string in what was told, if the request is still open."""
        self.scheduler.now = self.world.now
        if rid in self.open and self.tokens.get(rid):
            self.scheduler.stop(StopReq(rid))
            self._ended(rid, Stopped(rid))
        self.turn()

    def drain(self, to: list[tuple[str, int]]) -> None:
        """Do what SIGTERM does: take nothing in, and move what runs to the instances at these bootstrap addresses."""
        self.scheduler.draining = True
        self.manager.membership.withdraw()
        self.manager.move_all(to)
        self.turn()

    def change_role(self, role: DisaggregationMode) -> None:
        """Do what ``POST /role`` does."""
        self.scheduler.instance_role.mode = role
        self.manager.membership.register()
        self.turn()

    def migrate(self, rid: str, bootstrap_port: int) -> None:
        """Ask this instance to move a request to another."""
        number = self.world.number()
        self._moves.add(number)
        self.manager.migrate(MigrateReq(rid, HOST, bootstrap_port, id=number), self.world.now)
        self.turn()

    def resize(self, tokens: int, wait_s: float) -> None:
        """Ask for a pool of another size."""
        question = ResizeReq(tokens, wait_s, id=self.world.number())
        Handlers(self.scheduler.outbox, self.pool_resize).handle(question, self.world.now)
        self._note_pool_size()
        self.turn()

    def abort(self, rid: str) -> None:
        """Abort a request, as when its client leaves."""
        self.scheduler.now = self.world.now
        self.scheduler.abort(AbortReq(rid))
        self.turn()

    def on_event(self, event: StepResult | TransferEvent | PoolTrimmed | PagesHashed) -> None:
        """Handle an event from the worker."""
        if not self.alive:
            return
        self.scheduler.now = self.world.now
        if isinstance(event, StepResult):
            self.scheduler.on_step_result(event, self.world.now)
        elif isinstance(event, PoolTrimmed):
            self.pool_resize.on_trimmed(event, self.world.now)
        elif isinstance(event, PagesHashed):
            self.scheduler.memory.on_hashed(event, self.world.now)
        else:
            self.mismatches += isinstance(event, PagesVerified) and not event.ok
            self.manager.on_transfer_event(event, self.world.now)
        self.turn()

    # --- the worker's process ---

    def obey(self, message: Any) -> None:
        """Carry out a message to the worker."""
        if not self.alive:
            return
        if isinstance(message, ForwardStep):
            result = self.sim_worker.run(message)
            result.bad_entries = self.spoils(message)
            if self._machine is not None:
                result.forward_ms = self._machine(shape_of(message))
            self._emit(result)
            for push in message.pushes:
                self.engine.submit(push)
            self.work()
        elif isinstance(message, TrimPool):
            self._trim(message)
        elif isinstance(message, HashPages):
            self._emit(self.sim_worker.hashed(message, self.scheduler.worker.layout))
        else:
            self.engine.submit(message)
            self.work()

    def _trim(self, message: TrimPool) -> None:
        """Give memory back to the system. It comes again as zeros."""
        size = self.options.page_size
        for kv, first in zip(self.sim_worker.pools(), (message.first, message.first_window), strict=False):
            kv[first * size :] = 0
        self._emit(PoolTrimmed(0))

    def work(self) -> None:
        """Let the transfer engine do what there is to do."""
        if not self.alive or self.worker_frozen:
            return
        # A page at a time, so that there is something between two of them.
        slices = patch.multiple(push_queue, SLICE_BYTES=1, WINDOW_SLICES=2)
        with slices, patch.object(received_pages, "CHECK_BYTES", 1):
            # What a turn finds landed makes room for what only the next one can push.
            idle = 0
            while idle < 2:
                self.engine.turn(wait=False)
                idle = 0 if self.engine.working or self.backend.has_events else idle + 1

    def _emit(self, event: Any) -> None:
        what = f"{self.epoch} hears {type(event).__name__}"
        content = encode([event]) if not isinstance(event, StepResult) else str(event.step_id).encode()
        self.world.post(("events", self.epoch), what, functools.partial(self.on_event, event), content)

    # --- what becomes of it ---

    def die(self, keep: Any) -> None:
        """Kill all processes of the instance. ``keep``: see ``SimBackend.die``."""
        self.alive = False
        self.network.port.die()
        self.backend.die(keep)
        for channel in [c for c in self.world.channels if c[-1] == self.epoch and c[0] in OWN_CHANNELS]:
            self.world.forget(channel)

    def _hear(self) -> None:
        while self._to_detokenizer.messages:
            message = self._to_detokenizer.messages.popleft()
            if isinstance(message, ReqError):
                self._ended(message.rid, message)
            elif isinstance(message, ReqMoved):
                self._ended(message.rid, message)
                self.tokens.pop(message.rid, None)
            elif isinstance(message, ReqArrived):
                self.open.add(message.rid)
                self.arrivals[message.rid] = message.arrival
                self.world.answers[message.rid] = self.world.answers[message.rid.rpartition("@")[0]]
            elif isinstance(message, MigrateResult) or (
                isinstance(message, RefusedAnswer) and message.id in self._moves
            ):
                self.move_answers.append(message)
            elif isinstance(message, ResizeResult | RefusedAnswer):
                self.sizes.append(message)
            elif isinstance(message, TokenBatch):
                for item in message.items:
                    self._hear_tokens(item)

    def _hear_tokens(self, item: ReqTokens) -> None:
        if item.rid not in self.open:
            raise Violation(f"{self.epoch}: {item.rid} goes on after its end")
        tokens = self.tokens.setdefault(item.rid, [])
        tokens.extend(item.token_ids)
        said = item.logprobs if item.logprobs is not None else []
        if (item.rid in self.scored or said) and said != [logprob_of(token) for token in item.token_ids]:
            raise Violation(f"{self.epoch}: wrong log-probabilities of {item.token_ids} of {item.rid}: {said}")
        if tokens:
            self._waits_no_more(item.rid)
        expected = self.world.answers[item.rid]
        if tokens != expected[: len(tokens)]:
            raise Violation(f"{self.epoch}: wrong KV was used for {item.rid}: {tokens}, not {expected}")
        if item.finish is None:
            return
        is_outgoing = item.meta is not None and item.meta.route == "outgoing"
        wanted = (0 if item.rid in self.forks else 1) if is_outgoing else len(expected)
        prompt_tokens = item.meta.prompt_tokens if item.meta is not None else 0
        if item.finish.type is FinishType.LENGTH and len(tokens) not in self._lengths(item.rid, wanted, prompt_tokens):
            raise Violation(f"{self.epoch}: {item.rid} ended with {tokens} of {expected}")
        if item.meta is not None:
            age = self.world.now - self.arrivals[item.rid]
            takes_time = age > 0 and not self.computes_in_no_time
            problem = phases_problem(item.meta, age, computed=bool(tokens) and takes_time, reported_later=self._hung)
            if problem is not None:
                raise Violation(f"{self.epoch}: {item.rid}: {problem}")
        self._ended(item.rid, item)

    def _note_pool_size(self) -> None:
        size = self.scheduler.memory.pool.max_total_tokens
        if size != self.pool_sizes[-1][1]:
            self.pool_sizes.append((self.world.now, size))

    def _lengths(self, rid: str, wanted: int, prompt_tokens: int) -> set[int]:
        """Return the output lengths at which a request may end: all it wanted, or as far as the pool reached.

        The pool may have been resized, so every size that it had in the request's life counts. A pool that shrinks
        limits requests that came after the order to what a request alone in it may reach: two slots fewer.
        """
        page = self.options.page_size
        after = [at for at, _ in self.pool_sizes[1:]] + [math.inf]
        sizes = [size for (_, size), until in zip(self.pool_sizes, after, strict=True) if until >= self.arrivals[rid]]
        ends = {size - prompt_tokens for size in sizes} | {
            size // page * page - 2 - prompt_tokens for size in sizes[1:]
        }
        return {min(wanted, max(1, end)) for end in ends}

    def _ended(self, rid: str, how: Any) -> None:
        if rid not in self.open:
            raise Violation(f"{self.epoch}: {rid} ended twice")
        self.open.remove(rid)
        self._waits_no_more(rid)
        self.ended_at[rid] = self.world.now
        self.world.ends[self.epoch, rid] = how

    def _waits_no_more(self, rid: str) -> None:
        self.waits.setdefault(rid, self.world.now - self.arrivals[rid])

    def check(self) -> None:
        """Check that every page and every pin has an owner."""
        self.scheduler.check_invariants()

    def check_quiet(self) -> None:
        """Check that everything has ended and was given back."""
        usage = self.scheduler.memory.pool.usage()
        rooms = self.manager.transfers(self.world.now)
        in_use = usage["in_use"] + usage.get("window_in_use", 0)
        if self.open or rooms or in_use or usage["rows_in_use"] or self.backend.granted:
            raise Violation(
                f"{self.epoch}: at the end there are requests {sorted(self.open)}, rooms {rooms}, "
                f"{in_use} tokens in use, pages granted {sorted(self.backend.granted)}"
            )
        expected = self.manager.senders.estimates.expected
        if expected != NOTHING:
            raise Violation(f"{self.epoch}: at the end it expects {expected} of decodes that it has told")
        self.check()


OWN_CHANNELS = ("worker", "transfer", "events", "find")
