"""Dispatch of messages of peers: the side that gets each of them."""

from __future__ import annotations

from typing import get_args

import pytest
from support.handovers import named
from support.sim import make_options
from support.sim_pair import make_peer
from support.world.node import Node
from support.world.two_rooms import OPTIONS
from support.world.world import World

from pdserve.disaggregation.handover.peer_dispatcher import PeerDispatcher
from pdserve.messages.base import Message
from pdserve.messages.handover import Abort, HandoverMessage, Withdraw
from pdserve.messages.moves import MoveMessage


def test_every_message_of_a_hand_over_or_migration_has_a_handler() -> None:
    node = Node(World(), "d", 9000, make_options(**OPTIONS, disaggregation_mode="decode"))
    sides = (node.manager.senders, node.manager.receivers, node.manager.moves_out, node.manager.moves_in)
    handled = {kind for side in sides for kind in side.handlers()}
    assert handled == {*get_args(HandoverMessage), *get_args(MoveMessage)}


def test_a_message_goes_to_the_side_that_claims_its_hand_over() -> None:
    dispatcher, got = PeerDispatcher(), []

    def taking(name: str) -> dict[type[Message], object]:
        return {Abort: lambda peer, message, now: got.append((name, message.handover.room, now))}

    dispatcher.register(taking("first"), got.append, claims=lambda handover: handover.room == 1)  # type: ignore[arg-type]
    dispatcher.register(taking("rest"), got.append, on_down=got.append)  # type: ignore[arg-type]
    peer = make_peer("P")
    for room in (1, 2):
        dispatcher.on_message(peer, Abort("D", named(room), "no more"), 5.0)
    assert got == [("first", 1, 5.0), ("rest", 2, 5.0)]
    dispatcher.on_gone(peer)
    dispatcher.on_down(peer)
    assert got[2:] == [peer] * 3
    with pytest.raises(KeyError):
        dispatcher.on_message(peer, Withdraw("D", named(1)), 5.0)


def test_only_a_message_that_a_side_named_is_reported_as_too_long() -> None:
    dispatcher, got = PeerDispatcher(), []
    dispatcher.register({}, got.append, too_long={Abort: lambda peer, message: got.append(message)})
    peer, abort = make_peer("P"), Abort("D", named(1), "no more")
    dispatcher.on_too_long(peer, Withdraw("D", named(1)))
    dispatcher.on_too_long(peer, abort)
    assert got == [abort]
