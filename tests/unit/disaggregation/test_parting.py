"""An instance that gives its memory back parts from its peers, whatever is under way between them, and is one again."""

from __future__ import annotations

import random

import pytest
from support.sim import make_options, reference_output
from support.world.node import HOST, Node
from support.world.two_rooms import OPTIONS
from support.world.world import World

from pdserve.disaggregation.errors import NotRegistered

PORTS = {"p": 9000, "d": 9001}


class Pair:
    """A prefill and a decode; what happens next is chance."""

    def __init__(self, seed: int, *, lets_go: bool) -> None:
        self.world, self.rng = World(), random.Random(seed)
        self.nodes = {}
        for epoch, mode in (("p", "prefill"), ("d", "decode")):
            options = make_options(**(OPTIONS | {"max_total_tokens": 64, "disaggregation_mode": mode}))
            self.nodes[epoch] = Node(self.world, epoch, PORTS[epoch], options, lets_go=lets_go)
        self.rooms = 0

    def run(self, most: int = 100_000) -> None:
        """Run until nothing is under way, or for ``most`` steps."""
        for _ in range(most):
            ready = self.world.ready()
            if not ready:
                return
            self.world.step(self.rng.choice(ready))

    def ask(self) -> None:
        """Submit a request of two legs."""
        self.rooms += 1
        rid, prompt = f"r{self.rooms}", [self.rooms, 2, 3, 4, 5]
        self.world.answers[rid] = reference_output(prompt, 4)
        for epoch in ("p", "d"):
            self.nodes[epoch].submit(rid, prompt, self.rooms, PORTS["p"], max_new_tokens=4)

    def handed_over(self) -> int:
        return self.nodes["d"].manager.receivers.done

    def peers(self) -> list[int]:
        return [len(node.manager.info()["peers"]) for node in self.nodes.values()]


@pytest.mark.parametrize("lets_go", [False, True], ids=["owner closes", "writer lets go"])
@pytest.mark.parametrize("who", ["p", "d"])
def test_peers_part_and_find_each_other_again(who: str, lets_go: bool) -> None:
    for seed in range(20):
        pair = Pair(seed, lets_go=lets_go)
        pair.ask()
        pair.run()
        assert pair.handed_over() == 1
        manager = pair.nodes[who].manager
        manager.membership.close("its memory was given back")
        # Not before the last link is down: until then a peer might write.
        assert manager.membership.is_closed == (not manager.info()["peers"])
        pair.nodes[who].turn()
        pair.run()
        assert manager.membership.is_closed
        assert pair.peers() == [0, 0]
        with pytest.raises(NotRegistered, match="memory was given back"):
            pair.world.registries[HOST, PORTS[who]].current()
        manager.membership.register()  # which must not bring it back
        with pytest.raises(NotRegistered):
            pair.world.registries[HOST, PORTS[who]].current()
        manager.membership.open()
        pair.nodes[who].turn()
        pair.ask()
        pair.run()
        assert pair.handed_over() == 2
        for node in pair.nodes.values():
            node.check_quiet()


def test_an_instance_that_drains_is_not_registered_again_for_a_new_role() -> None:
    pair = Pair(1, lets_go=False)
    prefill = pair.nodes["p"]
    prefill.scheduler.draining = True
    prefill.manager.membership.withdraw()
    prefill.change_role("decode")
    assert prefill.scheduler.role == "decode"
    assert prefill.network.registration is None
    with pytest.raises(NotRegistered, match="is draining"):
        pair.world.registries[HOST, PORTS["p"]].current()


@pytest.mark.parametrize("seed", range(30))
def test_who_comes_meanwhile_is_hung_up_on_and_not_for_good(seed: int) -> None:
    """The prefill closes anywhere in the middle of being found, greeted and connected to."""
    pair = Pair(seed, lets_go=bool(seed % 2))
    decode, prefill = pair.nodes["d"], pair.nodes["p"]
    rid, prompt = "early", [9, 2, 3]
    pair.world.answers[rid] = reference_output(prompt, 4)
    decode.submit(rid, prompt, 99, PORTS["p"], max_new_tokens=4)
    pair.run(most=seed)
    prefill.manager.membership.close("its memory was given back")
    prefill.turn()
    pair.run()
    assert prefill.manager.membership.is_closed
    assert prefill.manager.info()["peers"] == []
    if (end := pair.world.ends.get(("d", rid))) is not None:
        # The error is that of an instance that is away for now, not of one that can never be reached.
        assert end.status == 503
    else:
        decode.abort(rid)
    prefill.manager.membership.open()
    prefill.turn()
    pair.ask()
    pair.run()
    assert pair.handed_over() == 1
