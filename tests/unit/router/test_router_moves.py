"""A request that an instance hands on in the middle of its answer: the rest comes from the one that it names."""

import pytest
from support.router_rig import DONE, EVENT, generate, scenario

from pdserve.runtime.web.moved_answer import FOLLOW, TICKET


@pytest.mark.parametrize("by_a_pair", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_rest_comes_from_who_goes_on(by_a_pair, stream):
    @scenario()
    async def run(rig):
        old, new, prefill = await rig.instance("move"), await rig.instance("ok"), await rig.instance("ok")
        old.follower = new
        client = await (rig.route([prefill], [old], [new]) if by_a_pair else rig.route(worker=[old, new]))
        answer = await generate(client, stream=stream)
        while not old.requests:  # it was the other one's turn
            answer = await generate(client, stream=stream)
        if stream:
            assert answer.content == 3 * EVENT + DONE  # one here, two there
        else:
            assert answer.json()["text"] == "ab"
        followed = new.requests[-1]
        assert "k" * 32 in followed.headers[TICKET.decode()]
        assert old.requests[-1].headers[FOLLOW.decode()] == "1"
        assert not any(name.startswith("bootstrap_") for name in followed.body)

    run()


@scenario()
async def test_a_client_cant_bring_a_ticket_itself(rig):
    one = await rig.instance("ok")
    client = await rig.route(worker=[one])
    answer = await client.post("/generate", json={"text": "x"}, headers={TICKET.decode(): "{}"})
    assert answer.status_code == 200
    assert TICKET.decode() not in one.requests[-1].headers


@scenario(retries=0)
async def test_who_is_not_known_here_is_not_followed(rig):
    old, stranger = await rig.instance("move"), await rig.instance("ok")
    old.follower = stranger
    client = await rig.route(worker=[old])
    answer = await generate(client)
    assert answer.status_code == 502
    assert "which this router does not know" in answer.text
    streamed = await generate(client, stream=True)
    assert streamed.content.startswith(EVENT)
    assert b"does not know" in streamed.content
    assert streamed.content.endswith(DONE)
    assert stranger.requests == []


@scenario(retries=0)
async def test_a_stream_whose_follower_is_dead_ends_in_an_error(rig):
    old, dead = await rig.instance("move"), await rig.instance("die")
    old.follower = dead
    client = await rig.route(worker=[old], decode=[dead])
    streamed = await generate(client, stream=True)
    assert streamed.content.startswith(EVENT)
    assert b'"error"' in streamed.content
    assert streamed.content.endswith(DONE)
