"""Messages between the scheduler and the model worker. One ordered channel each way."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .base import HandoverId, Message
from .kv_debug import HashPages, PagesHashed
from .memory import MemoryChanged, MemoryCommand, MemoryUse, PoolTrimmed, TrimPool, Unreleasable
from .outputs import TokenLogprob
from .profiling import ProfileCommand, ProfileEvent
from .tiers import TierCommand, TierEvent

MAX_PAGES = 1 << 18
"""Of one hand-over, of all groups together."""
MAX_LAYERS = 1 << 12
MAX_GROUPS = 8
"""Of pages; see ``KVGroup``."""

KVOrder = Literal["tokens", "blocks"]
"""How the elements of a layer's keys, or values, lie within a page.

"tokens": ``[page_size, kv_heads, head_dim]``, which torch reads. "blocks": heads before tokens, and a head's tokens as
the CPU kernels multiply them (``kernels/cpu/kv_blocks.h``), the same on every processor.
"""


KVKind = Literal["mha", "mla", "sparse"]
"""What a layer keeps of a token. "mha": the keys and the values of its KV heads, ``head_dim`` elements each. "mla": one
latent row of ``head_dim`` elements, a key of which the first ``value_dim`` are the value, too. "sparse": as "mha", and
of each key a copy of ``label_dim`` elements, by which the tokens are chosen that later ones attend to.
"""


class KVGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that keep the same of a token, for as long, and so share pages.

    A page is one contiguous span: for each of ``layers`` (by their numbers in the model, in that order) equally many
    bytes. Of kind "mha": ``[2, page_size * kv_heads * head_dim]`` of ``dtype``, keys, then values. Of kind "mla":
    ``[page_size * head_dim]``, rows in the place of keys, and ``kv_heads`` is 1. Of kind "sparse": keys, values, then
    ``[kv_heads, page_size, label_dim]`` of ``dtype``, of the channels that ``labels`` stands for (equal digests, equal
    channels), in the order "tokens" alone. Elements of one byte
    come with a scale for each head of each token, of ``scale_dtype`` (None: there are none): in the order "tokens"
    right behind the head's elements, in "blocks" those of a block's slots behind the block's elements.

    ``window``: no layer of the group sees more than so many tokens, and its pages go back behind that
    (``mem_cache/window_pages.py``); 0: they are kept. The first group of a layout is kept; where all layers have
    windows it has none, and its pages are mere numbers.
    """

    layers: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_LAYERS)], ...], Meta(max_length=MAX_LAYERS)]
    kind: KVKind
    kv_heads: int
    head_dim: int
    dtype: Annotated[str, Meta(max_length=32)]
    page_bytes: int
    value_dim: int = 0
    scale_dtype: Annotated[str, Meta(max_length=32)] | None = None
    window: int = 0
    label_dim: int = 0
    labels: Annotated[str, Meta(max_length=32)] = ""

    @property
    def num_layers(self) -> int:
        """How many layers share the pages."""
        return len(self.layers)

    @property
    def parts(self) -> tuple[str, ...]:
        """What lies of a layer in a page, in that order."""
        return {"mha": ("K", "V"), "mla": ("latent",), "sparse": ("K", "V", "labels")}[self.kind]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """How long each of the ``parts`` is, scales included."""
        layer = self.page_bytes // max(self.num_layers, 1)
        if self.kind != "sparse":
            return (layer // len(self.parts),) * len(self.parts)
        keys = layer * self.head_dim // (2 * self.head_dim + self.label_dim)
        return keys, keys, layer - 2 * keys


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV pages look. Two instances can exchange pages if their layouts differ in ``order`` at most."""

    page_size: int
    groups: Annotated[tuple[KVGroup, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    order: KVOrder = "tokens"

    @property
    def page_bytes(self) -> int:
        """What a page of each group takes together."""
        return sum(group.page_bytes for group in self.groups)

    @property
    def window_group(self) -> KVGroup | None:
        """The group whose pages go back, if there is one."""
        return next((group for group in self.groups if group.window), None)


PagesByGroup = list[bytes]
"""Page numbers (int32) of each group of a layout, in its order."""


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step took. The counts are those of ``scheduler/estimates/step_shape.py``."""

    decodes: int
    kv_tokens: int
    prompt_tokens: int
    prompt_pairs: float
    forward_ms: float


class MachineUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker chose of the machine it found, and why: for people, through ``/server_info``.

    ``cores``: where the compute threads run, ``bound`` if each has one of its own. ``allowed``: cores that the process
    may use. ``cpu_quota``: cores' worth of time, ``memory_total`` and ``memory_free``: bytes, all within the control
    groups. ``numa_node``: the one it stays on, None where there is one only. ``spin_us``: how long a thread waits at a
    barrier before it sleeps. ``kernel_level``: whose instructions the CPU kernels use, None where they don't run.
    """

    threads: int = 0
    cores: list[int] = []
    bound: bool = False
    allowed: list[int] = []
    cpu_quota: float | None = None
    numa_node: int | None = None
    spin_us: int = 0
    kernel_level: str | None = None
    memory_total: int = 0
    memory_free: int = 0
    reason: str = "nothing is computed here"


class WorkerReady(Message):
    """Worker → scheduler: the model is loaded. ``fingerprint`` identifies the weights (equal weights, equal value).

    ``max_total_tokens``: slots that may be handed out (page 0 excluded), a multiple of the page size.
    ``limit_tokens``: the same of what the pools are reserved for, and may grow to; 0: no more.
    ``host_pages``: of the second tier, 0 where there is none.
    ``max_window_tokens``: the same of the group whose pages go back behind a window, 0 where there is none, as far as
    they are reserved.
    ``backend_metadata``: opaque address of this worker's transfer backend, for the peer's ``ConnectPeer``.
    ``load_seconds``: what start-up spent where. ``measured``: steps of several sizes, from which the time of the first
    request's can be foreseen. ``step_weight_bytes``: what a decode step reads of weights, 0 where unknown.
    ``unreleasable``: memory that ``ReleaseMemory`` may not ask for.
    """

    fingerprint: str
    vocab_size: int
    context_length: int
    max_total_tokens: int
    layout: KVLayout
    device: str
    attention_backend: str
    weights_dtype: str
    backend_metadata: bytes
    load_seconds: dict[str, float]
    measured: list[MeasuredStep] = []
    step_weight_bytes: int = 0
    machine: MachineUse = MachineUse()
    max_window_tokens: int = 0
    host_pages: int = 0
    limit_tokens: int = 0
    unreleasable: list[Unreleasable] = []
    memory: MemoryUse = MemoryUse()


class RowInit(msgspec.Struct, forbid_unknown_fields=True):
    """A request takes a row of the request table; what the sampler needs to know of it. ``rid`` is for the log alone.

    ``history`` (int32: prompt, then output) is sent only where penalties need it, with ``prompt_len`` the border.
    ``logprobs``: alternatives to list for each sampled token, None for no logprobs at all. ``logit_bias``: token id →
    what is added to its logit.
    """

    row: int
    seed: int
    prompt_len: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    stop_ids: tuple[int, ...]
    logprobs: int | None = None
    history: bytes | None = None
    logit_bias: dict[int, float] = {}
    rid: str = ""


class SlotDelta(msgspec.Struct, array_like=True):
    """Positions ``start …`` of a row now live in ``slots`` (int32): a cached prefix, or duplicates replaced."""

    row: int
    start: int
    slots: bytes


class InputLogprobSpec(msgspec.Struct, array_like=True):
    """Prompt logprobs wanted from one entry of a step.

    The logits at offset ``first + i`` of the entry's tokens score token ``targets[i]`` (int32), the prompt's next
    token.
    """

    entry: int
    first: int
    targets: bytes
    top_num: int


class SendPages(Message):
    """In a ``ForwardStep``: push pages that are whole once it has run to the decode of ``handover`` (here and there,
    aligned). By itself: push pages that the steps before it have made whole.

    ``last``: no more of the hand-over's will come. ``checksum``: whether slices get theirs, or 0.
    """

    handover: HandoverId
    src_pages: PagesByGroup
    dst_pages: PagesByGroup
    last: bool
    checksum: bool = True


class SliceChecksum(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """xxh3_64 over a part of a hand-over that was written at once: of its pages ``first …`` of a group (``count`` of
    them, as they were handed in), the group's layers ``begin`` to ``end``, page by page.
    """

    first: Annotated[int, Meta(ge=0, le=MAX_PAGES)]
    count: Annotated[int, Meta(ge=1, le=MAX_PAGES)]
    begin: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    end: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    checksum: Annotated[int, Meta(ge=0)]
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)] = 0


class ForwardStep(Message):
    """Scheduler → worker: one forward pass. Arrays are int32 bytes; ``B`` entries, ``T`` tokens in all.

    An entry computes ``q_lens[b]`` tokens of the request in row ``rows[b]``, from position ``starts[b]`` on, and writes
    their KV to ``out_cache_loc`` (T slots, entries one after another), which is also what the row's positions
    map to from then on. Prefill chunks and decode steps mix freely. Where ``use_last[b]`` is 1 (``q_lens[b]`` is 1
    then) the token is the row's last sampled one, which the scheduler may not know yet, and ``input_ids`` holds a
    0 in its place. Where ``sample[b]`` is 1 the worker samples the next token after the entry's last one.
    Applied in order: ``new_rows``, ``slot_deltas``, ``window_pages``, the pass. ``pushes``: what leaves for peers as it
    is computed, or has been; the pages of one hand-over in the order of its steps.

    ``window_pages`` (pairs of int32): a page, and the page of the windowed group that holds the same tokens from now
    on, 0: none. Left out where nothing has changed.
    """

    step_id: int
    rows: bytes
    starts: bytes
    q_lens: bytes
    use_last: bytes
    sample: bytes
    input_ids: bytes
    out_cache_loc: bytes
    new_rows: list[RowInit] = []
    slot_deltas: list[SlotDelta] = []
    input_logprobs: list[InputLogprobSpec] = []
    pushes: list[SendPages] = []
    window_pages: bytes | UnsetType = UNSET

    @property
    def summary(self) -> str:
        """The step's number and size, for traces."""
        return f"step {self.step_id}: {len(self.rows) // 4} entries, {len(self.out_cache_loc) // 4} tokens"


class StepResult(Message):
    """Worker → scheduler: what a step gave.

    ``next_tokens``: int32, one for each entry with ``sample`` set, in order. ``logprobs``: aligned with it, None for
    rows that want none. ``input_logprobs``: one list for each ``ForwardStep.input_logprobs``, aligned with ``targets``.
    ``bad_entries``: entries whose logits were not finite; their token means nothing and the request must fail.
    ``compiled_kernels``: kernels of a GPU that were compiled since the result before, while steps waited for them.
    """

    step_id: int
    next_tokens: bytes
    forward_ms: float
    logprobs: list[TokenLogprob | None] | None = None
    input_logprobs: list[list[TokenLogprob]] = []
    bad_entries: list[int] = []
    compiled_kernels: int = 0


class RankLoaded(Message):
    """Another rank → the lead of its host: its weights are loaded, and take so many bytes; or it has done what a
    ``MemoryCommand``, ``TrimPool`` or ``ProfileCommand`` says, or has not (``error``).
    """

    rank: int
    weight_bytes: int
    error: str = ""


class RankSetup(Message):
    """Lead → the other ranks of its host: memory that they share, by descriptors of process ``pid``.

    ``pool``: KV pages of all the host's ranks, ``num_pages`` with page 0. ``exchange``: what they add up sums in, None
    where nothing of theirs does.
    """

    pid: int
    pool: int
    num_pages: int
    exchange: int | None


class CaptureGraphs(Message):
    """Lead → the other ranks of its host: capture the graphs of decode steps, as it does itself now."""


class AdmitPeer(Message):
    """Scheduler → worker: let ``peer`` (an epoch) write into our pool. Answered by ``PeerAdmitted`` or ``PeerFailed``.

    ``link`` numbers the scheduler's links, to whichever peer; it sends the next one for a peer after the
    ``PeerLinkDown`` of the last.
    """

    peer: str
    link: int


class ConnectPeer(Message):
    """Scheduler → worker: be able to write into the pool of ``peer``, which its transfer backend says how to reach by
    ``metadata``; admits it, too. Answered by ``PeerConnected`` or ``PeerFailed``. ``link``: see ``AdmitPeer``.
    """

    peer: str
    link: int
    metadata: bytes


class DisconnectPeer(Message):
    """Scheduler → worker: nothing more is exchanged by this link. Answered by ``PeerLinkDown``, once for each link:
    that may have been sent before this came.
    """

    peer: str
    link: int


class PeerAdmitted(Message):
    """Worker → scheduler: ``peer`` may write here."""

    peer: str
    link: int


class PeerConnected(Message):
    """Worker → scheduler: ``peer`` can be written to."""

    peer: str
    link: int


class PeerFailed(Message):
    """Worker → scheduler: ``AdmitPeer`` or ``ConnectPeer`` came to nothing. The link is to be disconnected."""

    peer: str
    link: int
    error: str


class PeerLinkDown(Message):
    """Worker → scheduler: ``peer`` can no longer write into this worker's pool, nor this worker into its."""

    peer: str
    link: int


class CancelSend(Message):
    """Scheduler → worker: stop pushing. Always answered by one ``SendEnded``."""

    handover: HandoverId


class SendEnded(Message):
    """Worker → scheduler: nothing more will be read from or written to the pages of ``handover``.

    ``error`` None and ``cancelled`` False mean that all pages arrived, ``last`` ones included. ``slices`` are all of
    them, in the order of their writes (none for a backend that moves nothing).
    ``seconds`` is time spent pushing, from ``began`` to ``ended`` (``time.monotonic()``; 0 where there was nothing to
    push) and not always.
    """

    handover: HandoverId
    slices: list[SliceChecksum] = []
    nbytes: int = 0
    seconds: float = 0.0
    cancelled: bool = False
    error: str | None = None
    began: float = 0.0
    ended: float = 0.0


class SendProgress(Message):
    """Worker → scheduler: more pages of ``handover`` have landed, ``nbytes`` in all. Told now and then of hand-overs
    that take seconds.
    """

    handover: HandoverId
    nbytes: int


class GrantPages(Message):
    """Scheduler → worker: ``peer`` may write these pages of our pools, until the hand-over's are revoked.

    ``order``, ``checksum``: as of ``VerifyPages``, for pools on a device, where pages are hashed and brought into our
    order as they come.
    """

    handover: HandoverId
    peer: str
    pages: PagesByGroup
    order: KVOrder | None = None
    checksum: bool = True


class RevokePages(Message):
    """Scheduler → worker: nobody may write the pages of ``handover`` any more. ``are_checked``: they are, next."""

    handover: HandoverId
    are_checked: bool = False


class VerifyPages(Message):
    """Scheduler → worker: are these pages of our pools (in the hand-over's order) wholly made up of ``slices``, each
    with its checksum? Answer: ``PagesVerified``.

    Without ``checksum`` it is enough that they are. ``order``: in which they were sent, None for our own. Pages of
    another order are converted in place once they are found right, so nobody else may use them before the answer.
    """

    handover: HandoverId
    pages: PagesByGroup
    slices: list[SliceChecksum]
    order: KVOrder | None = None
    checksum: bool = True


class PagesVerified(Message):
    """Worker → scheduler: whether the landed pages are what the sender had; they lie in our own order now."""

    handover: HandoverId
    ok: bool


SendCommand = ConnectPeer | SendPages | CancelSend
"""In one order with the steps, and so with what they push: by no later link."""
ReceiveCommand = AdmitPeer | DisconnectPeer | GrantPages | RevokePages | VerifyPages
"""These must not wait for a step: peers do, who are about to write, and requests whose KV has landed."""
TransferCommand = SendCommand | ReceiveCommand
PeerCommand = AdmitPeer | ConnectPeer | DisconnectPeer
PeerEvent = PeerAdmitted | PeerConnected | PeerFailed | PeerLinkDown
TransferEvent = PeerEvent | SendProgress | SendEnded | PagesVerified
WorkerCommand = ForwardStep | SendCommand | TierCommand | MemoryCommand | TrimPool | HashPages | ProfileCommand
WorkerEvent = (
    WorkerReady | StepResult | TransferEvent | TierEvent | MemoryChanged | PoolTrimmed | PagesHashed | ProfileEvent
)
FollowerCommand = RankSetup | ForwardStep | CaptureGraphs | MemoryCommand | TrimPool | ProfileCommand
