"""The scene that is explored: two instances, two rooms, and at most one fault.

It is a prefill and a decode with an open link; or two equals that don't know each other yet, with one room each way, so
that both dial.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from pdserve.messages.outputs import ReqError
from pdserve.scheduler.req import Req, Route
from support.sim import NO_WINDOW, SimWindow, make_options, reference_output
from support.world.node import HOST, Node
from support.world.signature import signature
from support.world.world import Channel, Happening, Violation, World

OPTIONS = {
    "page_size": 2,
    "max_running_requests": 4,
    "chunked_prefill_size": 2,
    "itl_budget_ms": 0,
    "schedule_conservativeness": 0.0,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "disaggregation_bootstrap_timeout": 1e6,
    "disaggregation_queue_timeout": 1e6,
    "disaggregation_transfer_timeout": 1e6,
    "disaggregation_heartbeat_timeout": 1e6,
    "disaggregation_heartbeat_interval": 1e6,
    "handover": "on",
}
PORT = 9000
ROOMS = (71, 72)
PROMPTS = ([1, 2], [4, 5, 6])
"""The decode has two pages: the first request takes both once it decodes, the second needs both to land."""
OUTPUT = 2
Move = tuple[str, Callable[[], None]]
FAULTS = ("none", "abort", "control", "data", "crash of the prefill", "crash of the decode", "repeat", "corrupt")


class TwoRooms:
    """See ``Scene``. ``fault``: one of ``FAULTS``, which may happen once, whenever it can.

    ``equals``: see the module. ``pool``: tokens that the decode has memory for. ``same``: both rooms have one name.
    ``lets_go``: see ``SimBackend``. ``cached``: with a prefix cache; an idle prefill then begins before it is asked.
    ``here``: requests that are done sooner if they are computed where they decode, None: no estimate is asked for.
    """

    def __init__(
        self,
        fault: str = "none",
        *,
        equals: bool = False,
        pool: int = 4,
        same: bool = False,
        lets_go: bool = False,
        cached: bool = False,
        window: SimWindow = NO_WINDOW,
        here: frozenset[str] | None = None,
    ) -> None:
        self.world = World()
        self._options = OPTIONS | {"disable_radix_cache": not cached}
        self._here = here or frozenset()
        self._window = window
        if here is not None:
            self._options |= {"disaggregation_threshold": "auto"}
        self.prefill = self._node("p", "unified" if equals else "prefill", PORT, 8, lets_go=lets_go)
        self.decode = self._node("d", "unified" if equals else "decode", PORT + 1, pool, lets_go=lets_go)
        self._fault: str | None = fault
        # If no peer is lost and each leg has its other, no leg has to wait for a limit.
        self._times_out = same or fault not in ("none", "abort", "repeat", "corrupt")
        self._spares = fault in ("none", "abort") and not same
        self._rids: list[str] = []
        self._touched: set[str] = set()
        if not equals:
            self.decode.manager._peers.peer_at(HOST, PORT, self.world.now)
            self.decode.turn()
            self._drain()
        for i, prompt in enumerate(PROMPTS):
            self._submit(f"r{i}", prompt, ROOMS[0] if same else ROOMS[i], PORT + i if equals else PORT)

    def moves(self) -> list[str]:
        """See ``Scene``."""
        world = self.world
        return [world.channels[c][0].what for c in world.ready()] + [name for name, _ in self._faults()]

    def make(self, move: int) -> None:
        """See ``Scene``."""
        ready = self.world.ready()
        if move < len(ready):
            self.world.step(ready[move])
            return
        _, act = self._faults()[move - len(ready)]
        self._fault = None
        act()

    def signature(self) -> int:
        """See ``Scene``."""
        ends = {leg: type(end).__name__ for leg, end in self.world.ends.items()}
        return signature(
            self.world, [self.prefill, self.decode], (self._fault, str(self._touched), str(sorted(ends.items())))
        )

    def check(self, *, over: bool) -> None:
        """See ``Scene``."""
        for node in (self.prefill, self.decode):
            if node.alive:
                node.check()
                if over:
                    self._check_end(node)
        if over and self.world.channels:
            stuck = [waiting[0].what for waiting in self.world.channels.values()]
            raise Violation(f"for ever stuck: {stuck}")

    # --- what it is made of ---

    def _node(self, epoch: str, mode: str, port: int, pool: int, *, lets_go: bool) -> Node:
        options = make_options(**(self._options | {"disaggregation_mode": mode, "max_total_tokens": pool}))
        node = Node(
            self.world, epoch, port, options, lets_go=lets_go, window=self._window, foresees=self._estimate_first
        )
        node.manager.on_first_token = lambda req, now: None  # type: ignore[method-assign]  # what is learned decides nothing
        return node

    def _estimate_first(self, req: Req) -> float:
        is_decode = req.route is not Route.OUTGOING
        return 1.0 if not is_decode else 0.0 if req.rid in self._here else 2.0

    def _submit(self, rid: str, prompt: list[int], room: int, port: int) -> None:
        self._rids.append(rid)
        self.world.answers[rid] = reference_output(prompt, OUTPUT)
        for node in (self.prefill, self.decode):

            def submit(node: Node = node) -> None:
                if node.alive:
                    node.submit(rid, prompt, room, port, max_new_tokens=OUTPUT)

            self.world.post(("client", rid, node.epoch), f"{node.epoch} gets {rid}", submit)

    def _drain(self) -> None:
        while True:
            ready = self.world.ready()
            if not ready:
                return
            self.world.step(ready[0])

    def _check_end(self, node: Node) -> None:
        if self._times_out and (node.open or node.manager.transfers(self.world.now)):
            self.world.now += 2e6
            node.turn()
            self._drain()
        node.check_quiet()
        # The prompt is computed again then, so that nothing else tells.
        if self._spares and node.mismatches:
            raise Violation(f"{node.epoch}: KV that landed was not what was sent, although nothing was done to it")
        for rid in self._rids if self._spares else ():
            end = self.world.ends[node.epoch, rid]
            if isinstance(end, ReqError) and rid not in self._touched:
                raise Violation(f"{node.epoch}: {rid} failed although nothing was done to it: {end.message}")

    # --- faults ---

    def _faults(self) -> list[Move]:
        if self._fault in (None, "none"):
            return []
        made: dict[str, Callable[[], list[Move]]] = {
            "abort": self._aborts,
            "control": self._breaks_of_control,
            "data": self._breaks_of_data,
            "crash of the prefill": lambda: self._crashes(self.prefill),
            "crash of the decode": lambda: self._crashes(self.decode),
            "repeat": self._repeats,
            "corrupt": lambda: [("pages of the prefill arrive wrong", self._corrupt)],
        }
        return made[str(self._fault)]()

    def _aborts(self) -> list[Move]:
        def abort(node: Node, rid: str) -> None:
            self._touched.add(rid)
            node.abort(rid)

        return [
            (f"{node.epoch} loses the client of {rid}", functools.partial(abort, node, rid))
            for node in (self.prefill, self.decode)
            for rid in sorted(node.open)
        ]

    def _breaks_of_control(self) -> list[Move]:
        connections = self.prefill.network.port.connections
        if not connections:
            return []
        connection, _ = connections[0]

        def break_it(keep: int) -> None:
            for side in (0, 1):
                self.world.forget(connection.channel(side), keep)
                connection.post(side, "the connection breaks", functools.partial(connection.end, 1 - side, "it broke"))

        whole: list[Move] = [("the control connection ends", lambda: break_it(1 << 30))]
        return [*whole, ("the control connection breaks, what is under way is lost", lambda: break_it(0))]

    def _breaks_of_data(self) -> list[Move]:
        links = [link for link in self.prefill.backend.links() if link.owner is not None]
        if not links:
            return []
        link = links[0]

        def break_it() -> None:
            owner = link.owner
            assert owner is not None
            self.world.forget(link.channel("out"))
            self.world.post(link.channel("out"), "the link breaks", lambda: owner.on_end(link, "it broke"))
            self.world.post(link.channel("back"), "the link breaks", lambda: link.writer.on_end(link, "it broke"))

        return [("the data link breaks, pages under way are lost", break_it)]

    def _crashes(self, node: Node) -> list[Move]:
        if not node.alive:
            return []

        def die(keep: Callable[[int], int]) -> None:
            for connection, side in node.network.port.connections:
                sent = len(self.world.channels.get(connection.channel(side), ()))
                self.world.forget(connection.channel(side), keep(sent))
            node.die(keep)

        return [
            (f"{node.epoch} dies, what it sent arrives", lambda: die(lambda n: n)),
            (f"{node.epoch} dies, nothing of what it sent arrives", lambda: die(lambda n: 0)),
        ]

    def _repeats(self) -> list[Move]:
        def repeat(channel: Channel, said: Happening) -> None:
            self.world.post(channel, f"{said.what} again", said.act, said.content)

        return [
            (f"{waiting[-1].what}, twice", functools.partial(repeat, channel, waiting[-1]))
            for channel, waiting in self.world.channels.items()
            if channel[0] == "control" and waiting[-1].content
        ]

    def _corrupt(self) -> None:
        self.prefill.backend.corrupts = True
