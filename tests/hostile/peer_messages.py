"""Control messages as a hostile peer writes them: well-formed with any meaning, and with anything in their fields."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
from support.strangers import huge_length, nested, spoil

from pdserve.messages.base import HandoverId, Message
from pdserve.messages.channel import encode
from pdserve.messages.handover import (
    Abort,
    AbortAck,
    Declined,
    FirstToken,
    Forecast,
    ForecastRequest,
    Heartbeat,
    Invite,
    Progress,
    Refused,
    RoomQueued,
    TransferDone,
    TransferFailed,
    TransferRequest,
    Welcome,
    Withdraw,
    Withdrawn,
)
from pdserve.messages.moves import MoveCommit, MoveOffer, MoveReady, MoveRefused, MoveTaken, RunningRequest
from pdserve.messages.outputs import Phase, PhaseTime, Timing, TokenLogprob
from pdserve.messages.peer import PeerMessage
from pdserve.messages.requests import GenerateReq, LogprobOptions
from pdserve.messages.sampling import SamplingParams
from pdserve.messages.worker import SliceChecksum

MALICE = (None, True, -1, 0, 2**31, 2**63 - 1, 2**64 - 1, 1.5, float("nan"), float("inf"), "", "x" * 3000, "\n\x00")
MALICE_2 = (b"", b"\xff" * 7, b"\x00" * 4096, [], [[]], {}, {"x": 1}, [1] * 2000)
VOCABULARY = 49152
FAILED = "what a hostile peer says of its failure"


class Messages:
    """Makes messages for the instance ``epoch`` from the instance ``mine``, about ``rooms`` that both know or not."""

    def __init__(self, rng: random.Random, mine: str, epoch: str, page_tokens: int) -> None:
        self._rng = rng
        self.mine, self.epoch = mine, epoch
        self._page_tokens = page_tokens
        self.rooms: list[HandoverId] = []
        """Hand-overs that were heard of, or begun; the newest last."""
        self.prompts: dict[int, tuple[int, int]] = {}
        """Length and digest of the prompt of each room that the attacker has asked for itself."""

    def handover(self) -> HandoverId:
        """Return a known hand-over, or a new one."""
        rng = self._rng
        if self.rooms and rng.random() < 0.7:
            return rng.choice(self.rooms[-8:])
        epoch = rng.choice((self.mine, self.epoch, "x" * 128, ""))
        made = HandoverId(epoch, rng.choice((0, 1, rng.getrandbits(63))), rng.choice((0, 1, rng.getrandbits(63))))
        self.rooms = [*self.rooms[-64:], made]
        return made

    def payload(self) -> bytes:
        """Return a frame's content: one or more messages, or something invalid."""
        rng = self._rng
        honest = encode([self.message() for _ in range(rng.choice((1, 1, 1, 2, 8)))])
        kind = rng.randrange(12)
        if kind < 8:
            return honest
        if kind == 8:
            return spoil(rng, honest)
        if kind == 9:
            return self.wrong_types()
        return rng.choice((nested(rng), huge_length(rng), rng.randbytes(rng.choice((1, 50, 4000)))))

    def wrong_types(self) -> bytes:
        """Return a message with random values in some of its fields."""
        rng = self._rng
        fields: dict[str, Any] = msgspec.to_builtins(self.message(), builtin_types=(bytes,))
        for name in rng.sample(sorted(fields), k=rng.randrange(1, len(fields) + 1)):
            fields[name] = rng.choice((*MALICE, *MALICE_2))
        return msgspec.msgpack.encode([fields])

    def message(self) -> Message:
        """Return any message of the peers' protocol, whether it is time for it or not."""
        rng, epoch, handover = self._rng, self.epoch, self.handover()
        if rng.random() < 0.05:
            epoch = rng.choice(("", "x" * 128, self.mine))
        made: dict[type, Any] = {
            Heartbeat: lambda: Heartbeat(epoch),
            Invite: lambda: Invite(epoch, rng.randbytes(rng.choice((0, 50, 4096)))),
            Welcome: lambda: Welcome(epoch),
            Refused: lambda: Refused(epoch, rng.choice(("", "no\n[forged] line", "x" * 2048))),
            TransferRequest: lambda: self.transfer_request(epoch, handover),
            RoomQueued: lambda: RoomQueued(epoch, handover),
            ForecastRequest: lambda: ForecastRequest(epoch, handover),
            Forecast: lambda: Forecast(epoch, handover, rng.choice((0.0, 1e-300, 1e9))),
            Declined: lambda: Declined(epoch, handover),
            Progress: lambda: Progress(epoch, handover, rng.choice((0, 1, 5, (1 << 31) - 1))),
            FirstToken: lambda: self.first_token(epoch, handover),
            TransferDone: lambda: TransferDone(epoch, handover, self.slices(), self.timing(), rng.randbytes(8 * 3)),
            TransferFailed: lambda: TransferFailed(epoch, handover, rng.choice((400, 500, 503, 599)), FAILED),
            Withdraw: lambda: Withdraw(epoch, handover),
            Withdrawn: lambda: Withdrawn(epoch, handover, rng.random() < 0.5),
            Abort: lambda: Abort(epoch, handover, rng.choice(("", "\x1b[2J"))),
            AbortAck: lambda: AbortAck(epoch, handover),
            MoveOffer: lambda: self.offer(epoch, handover),
            MoveReady: lambda: MoveReady(epoch, handover),
            MoveCommit: lambda: self.commit(epoch, handover),
            MoveTaken: lambda: MoveTaken(epoch, handover, rng.randbytes(32).hex(), rng.choice((1, 65535))),
            MoveRefused: lambda: MoveRefused(epoch, handover, "no"),
        }
        kinds = [kind for kind in get_args(PeerMessage) if kind in made]
        # These end the connection, or may only once be said.
        rare = (Refused, Invite)
        message: Message = made[rng.choices(kinds, [0.2 if kind in rare else 3 for kind in kinds])[0]]()
        return message

    def transfer_request(self, epoch: str, handover: HandoverId) -> TransferRequest:
        """Make a request for the room's prompt or another one, with pages of this peer, of a fitting number or not."""
        rng = self._rng
        length, digest = self.prompts.get(handover.room, (rng.randrange(1 << 31), rng.getrandbits(64)))
        pages = -(-length // self._page_tokens) if length < 10_000 else rng.randrange(300)
        pages = rng.choice((pages, pages, pages, 0, pages + 1, 5000))
        numbers = b"".join(rng.choice((i + 1, i + 1, 2**31 - 1)).to_bytes(4, "little") for i in range(pages))
        start = rng.choice((0, 0, 0, self._page_tokens, 1, length))
        groups = [numbers] * rng.choice((1, 1, 1, 1, 2, 8))
        return TransferRequest(epoch, handover, length, digest, start, groups, rng.random() < 0.8, rng.random() < 0.2)

    def first_token(self, epoch: str, handover: HandoverId) -> FirstToken:
        """Return a token that mostly exists, with logprobs that were asked for or not."""
        rng = self._rng
        token = rng.choice((5, VOCABULARY - 1, VOCABULARY, (1 << 31) - 1))
        top = [(rng.choice((1, -5, VOCABULARY)), -0.5)] * rng.choice((0, 1, 500))
        logprob = rng.choice((None, TokenLogprob(token, rng.choice((None, -1.0, float("nan"))), top)))
        inputs = rng.choice((None, [TokenLogprob(1, -1.0, top)] * rng.choice((0, 3, 2000))))
        return FirstToken(epoch, handover, token, rng.choice((0, 16, (1 << 31) - 1)), self.timing(), logprob, inputs)

    def dense(self, size: int) -> bytes:
        """Return a frame of ``size`` bytes that takes as much memory as possible."""
        first = FirstToken(self.epoch, self.handover(), 5, 0, Timing(), None, [])
        before, name, after = encode([first]).partition(b"input_logprobs")
        count = (size - len(before) - len(name) - len(after)) // 3
        return before + name + b"\xdd" + count.to_bytes(4, "big") + b"\x92\x00\xc0" * count + after[1:]

    def slices(self) -> list[SliceChecksum]:
        """Return made-up checksums of written pages."""
        rng = self._rng
        numbers = [rng.choice((0, 1, 2, 4096)) for _ in range(6)]
        one = SliceChecksum(numbers[0], numbers[1], numbers[2], numbers[3], rng.getrandbits(64), numbers[5] % 8)
        return [one] * rng.choice((0, 1, 2, 3000))

    def timing(self) -> Timing:
        """Return durations within their bounds."""
        ms = self._rng.choice((0.0, 1.0, -1e9, 1e9))
        phases = [PhaseTime(self._rng.choice(list(Phase)), "prefill", abs(ms))] * self._rng.choice((0, 1, 32))
        return Timing(queue_ms=ms, prefill_ms=ms, phases=phases, transfer_bytes=self._rng.choice((0, 1 << 40)))

    def offer(self, epoch: str, handover: HandoverId) -> MoveOffer:
        """Return an offer of a request that could move there, or nearly. It belongs to no key."""
        rng = self._rng
        length = rng.choice((1, 16, 48, 200, 3000))
        prompt = b"".join(
            rng.randrange(VOCABULARY + (rng.random() < 0.001)).to_bytes(4, "little") for _ in range(length)
        )
        tokens = rng.choice((1, 1, 8, 64, (1 << 31) - 1))
        sampling = SamplingParams(
            seed=rng.choice((0, 1, 2**63 - 1)),
            max_new_tokens=tokens,
            min_new_tokens=rng.choice((0, 0, (1 << 31) - 1)),
            temperature=rng.choice((0.0, 1.0, 1e30)),
            top_k=rng.choice((-1, 0, 1, (1 << 31) - 1)),
            frequency_penalty=rng.choice((0.0, 2.0, 1e30)),
            repetition_penalty=rng.choice((1.0, 1e-30, 1e30)),
            stop=rng.choice(((), ("",), ("x" * 10_000,), ("a",) * 4096)),
            logit_bias=rng.choice(({}, {5: 1e30}, dict.fromkeys(range(2000), 1.0))),
        )
        logprobs = LogprobOptions(rng.choice((-1, 0, 5, 10**6)), rng.choice((0, 5, 128)))
        request = GenerateReq(
            rid=rng.choice(("r", "r\n", "x" * 1024, "r@" + "0" * 16)),
            input_ids=prompt,
            sampling=sampling,
            stop_ids=rng.choice(((), (2,))),
            arrival=rng.choice((0.0, 1e300, -1e300)),
            logprobs=rng.choice((None, logprobs)),
            extra_key=rng.choice(("", "x", "\x00\x00")),
            stream=rng.random() < 0.5,
            priority=rng.choice((0, 2**31 - 1, -(2**31) + 1)),
            timeout_s=rng.choice((0.0, 1e-9, 1e9)),
            key_name=rng.choice(("", "mallory", "(admin)")),
            fork_of=rng.choice(("", "", "nobody")),
        )
        output = prompt[: 4 * rng.choice((0, 0, 1, 5))]
        running = RunningRequest(request, output, tokens, rng.choice((0.0, 1.0, 1e9)))
        known = (len(prompt) + len(output)) // 4
        whole = known // self._page_tokens * self._page_tokens
        return MoveOffer(epoch, handover, running, rng.choice((0, 0, whole, known, whole + 16)), rng.random() < 0.3)

    def commit(self, epoch: str, handover: HandoverId) -> MoveCommit:
        """Return a commit with tokens that follow those of an offer."""
        rng = self._rng
        output = rng.choice((b"", b"\x05\x00\x00\x00" * rng.choice((1, 60, 5000)), b"\xff\xff\xff\xff", b"xyz"))
        logprobs = [TokenLogprob(5, -1.0, [(6, -2.0)] * rng.choice((0, 5)))] * rng.choice((0, 1, len(output) // 4))
        numbers = (rng.choice((0, 16, 2**31 - 1)), rng.choice((0, 2**31 - 1)))
        age = rng.choice((0.0, 1.0, 1e9))
        return MoveCommit(epoch, handover, output, *numbers, age, self.timing(), logprobs, rng.choice((None, logprobs)))
