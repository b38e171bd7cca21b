"""Pushing the KV of prompts to their decodes, while the prompts are computed.

The first token is sent as soon as it is known, before the last pages have landed. ``TransferDone`` follows when the
worker has sent everything.
"""

from __future__ import annotations

from ...messages.base import pack_i32, unpack_i32
from ...messages.handover import FirstToken, Progress, TransferDone
from ...messages.outputs import FinishReason, FinishType, Phase, TokenLogprob
from ...messages.worker import SendEnded, SendPages, SendProgress
from ...scheduler.req import Req, ReqState
from ...scheduler.scheduler import Scheduler
from ..transfer.outgoing_pages import PROGRESS_SECONDS
from .kv_sender import FirstOutput, KVSender, PromptTransfer, SenderState, delivered_pages, timing_for_decode
from .limits import HandoverLimits
from .sender_rooms import SenderRooms


class PromptPushes:
    """The pushes of all rooms, from the first planned chunk of a prompt to its ``TransferDone``."""

    def __init__(self, scheduler: Scheduler, rooms: SenderRooms, page_size: int, limits: HandoverLimits) -> None:
        self._scheduler = scheduler
        self._rooms = rooms
        self._page_size = page_size
        self._limits = limits
        self.done = 0
        self.bytes_sent = 0
        self.push_seconds = 0.0

    def take_computed_pages(self, req: Req) -> SendPages | None:
        """Return the pages that the step about to be sent completes, for the worker to push after it.

        None if it completes no page, or the decode has not asked for the KV. The prompt's last push comes even without
        pages, to mark the end. The request's memory is pinned from the first push until the worker's ``SendEnded``.
        """
        sender = self._rooms.of(req)
        if sender is None or sender.transfer is None or sender.state is SenderState.DRAINING:
            return None
        transfer, pinned = sender.transfer, self._scheduler.memory.pinned
        sender.state = SenderState.PUSHING
        self._advanced(sender, transfer)
        run, last = transfer.run, req.computed >= req.prompt_len
        end = run.end if last else req.computed // self._page_size
        start = transfer.next_page
        if end <= start and not last:
            return None
        if transfer.hold is None:
            transfer.hold = pinned.pin(req)
        src = pinned.pages_in(transfer.hold, run, start, end)
        request = transfer.transfer_request
        theirs = zip(request.dst_pages, run.places(start, end), strict=True)
        dst = [pack_i32(unpack_i32(pages)[part]) for pages, part in theirs]
        transfer.next_page = max(start, end)
        return SendPages(transfer.decode.handover, [pack_i32(pages) for pages in src], dst, last, request.checksum)

    def on_prompt_computed(self, req: Req, token: int, logprob: TokenLogprob | None) -> None:
        """Send the first token of a computed prompt to the decode, so that its client need not wait for the KV.

        If the decode has not asked for the KV yet, keep the token until then.
        """
        sender = self._rooms.of(req)
        if sender is None or sender.state is SenderState.DRAINING:
            return
        transfer = sender.transfer
        if transfer is None:
            sender.first = FirstOutput(req, token, logprob)
            req.phases.enter(Phase.QUEUE, self._scheduler.now, at="decode")
            return
        peer, handover = transfer.decode.peer, transfer.decode.handover
        transfer.computed = True
        self._advanced(sender, transfer)
        timing = timing_for_decode(req, None, self._scheduler.now)
        scores, beyond = req.input_logprobs, req.cached_beyond
        peer.send(FirstToken(peer.epoch, handover, token, req.cached_tokens, timing, logprob, scores, beyond))
        self._finish_if_whole(sender, transfer)

    def on_progress(self, event: SendProgress) -> None:
        """Record that more bytes of a hand-over have landed at the decode, and restart its time limit."""
        sender = self._rooms.by_number.get(event.handover.room)
        if sender is None or sender.transfer is None or sender.state is not SenderState.PUSHING:
            return
        transfer = sender.transfer
        if transfer.decode.handover == event.handover and event.nbytes > transfer.landed:
            transfer.landed = event.nbytes
            self._advanced(sender, transfer)

    def _advanced(self, sender: KVSender, transfer: PromptTransfer) -> None:
        """Restart the time limit of a hand-over, and report the progress so that the decode restarts its own.

        Reports are at least ``PROGRESS_SECONDS`` apart.
        """
        now, run, peer = self._rooms.now, transfer.run, transfer.decode.peer
        sender.deadline = now + (self._limits.transfer if transfer.computed else self._limits.piece)
        if now - transfer.reported_at < PROGRESS_SECONDS:
            return
        transfer.reported_at = now
        computed = run.end if transfer.computed else transfer.req.computed // self._page_size
        pages = computed + delivered_pages(self._scheduler.worker.layout, run, transfer.landed)
        peer.send(Progress(peer.epoch, transfer.decode.handover, pages))

    def on_send_ended(self, event: SendEnded) -> None:
        """Unpin the memory of a push that the worker has ended. If it failed or was cancelled, the hand-over ends.

        Otherwise it is complete as soon as the first token was sent, too.
        """
        sender = self._rooms.by_number.get(event.handover.room)
        if sender is None or sender.transfer is None or sender.transfer.decode.handover != event.handover:
            return
        transfer, failure = sender.transfer, sender.failure
        if failure is not None and not event.cancelled:
            return  # it crossed our CancelSend; the answer to that is under way and must find this room
        if transfer.hold is not None:
            self._scheduler.memory.pinned.unpin(transfer.hold)
            transfer.hold = None
        transfer.sent = event
        self.bytes_sent += event.nbytes
        self.push_seconds += event.seconds
        if failure is not None:
            self._rooms.drained(sender, failure)
        elif event.error is not None or event.cancelled:
            self._rooms.drain(sender, 502, f"the KV transfer failed: {event.error or 'cancelled'}")
        else:
            self._finish_if_whole(sender, transfer)

    def _finish_if_whole(self, sender: KVSender, transfer: PromptTransfer) -> None:
        req, request, sent = transfer.req, transfer.transfer_request, transfer.sent
        peer, handover = transfer.decode.peer, transfer.decode.handover
        if not transfer.computed or sent is None or sender.state is SenderState.DRAINING:
            return
        debug, hashes = self._scheduler.memory.debug, b""
        if request.hashes:
            if transfer.looks is None:
                transfer.looks = debug.newest
                if not debug.when_past(transfer.looks, lambda: self._finish_if_whole(sender, transfer)):
                    return
            hashes = debug.hashes_of(
                req, request.decode_prefix_len // self._page_size, req.prompt_len // self._page_size
            )
        req.timing.transfer_bytes = sent.nbytes
        req.timing.push_ms = sent.seconds * 1000
        timing = timing_for_decode(req, sent, self._scheduler.now)
        peer.send(TransferDone(peer.epoch, handover, sent.slices, timing, hashes))
        self._rooms.close(sender)
        self.done += 1
        self._scheduler.end(req, ReqState.FINISHED, FinishReason(FinishType.LENGTH))
