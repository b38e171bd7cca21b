"""Messages between the scheduler and the model worker. One ordered channel each way."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .base import HandoverId, Message
from .grammar import ForgetGrammar, GrammarPrepared, PrepareGrammar
from .kv_debug import HashPages, PagesHashed
from .memory import MemoryChanged, MemoryCommand, MemoryUse, PoolTrimmed, TrimPool, Unreleasable
from .outputs import TokenLogprob
from .profiling import ProfileCommand, ProfileEvent
from .readout import ReadoutSpec
from .sampling import SamplingParams
from .tiers import TierCommand, TierEvent

MAX_PAGES = 1 << 18
"""Maximum pages of one hand-over, of all groups together."""
MAX_LAYERS = 1 << 12
MAX_GROUPS = 8
"""Maximum number of groups of layers; see ``KVGroup``."""

KVOrder = Literal["tokens", "blocks"]
"""Order of the elements of a layer's keys, or values, within a page.

"tokens" is ``[page_size, kv_heads, head_dim]``, which torch reads. "blocks" has heads before tokens, and a head's
tokens as the CPU kernels multiply them (``cpu_engine/src/kv_blocks.h``). It is the same on every processor.
"""

KVKind = Literal["mha", "mla", "sparse"]
"""What a layer stores for a token.

- "mha": keys and values of its KV heads, ``head_dim`` elements each.
- "mla": one latent row of ``head_dim`` elements. It is the key, and its first ``value_dim`` elements are the value.
- "sparse": as "mha", and ``label_dim`` elements of each key once more. They decide which tokens later ones attend to.
"""


class KVGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share pages, because they store the same for a token and keep it equally long.

    A page is one contiguous span with equally many bytes for each layer. The bytes of a layer depend on the kind:

    - "mha": ``[2, page_size * kv_heads * head_dim]`` of ``dtype``, keys before values.
    - "mla": ``[page_size * head_dim]``, rows in place of keys; ``kv_heads`` is 1.
    - "sparse": keys, values, then ``[kv_heads, page_size, label_dim]`` of ``dtype``; only in the order "tokens".

    Elements of one byte have a scale of ``scale_dtype`` for each head of each token. In the order "tokens" it follows
    the head's elements. In "blocks", the scales of a block's slots follow the block's elements.

    The first group of a layout has no window. If all layers have windows, it has no layers, and its pages have no
    memory.
    """

    layers: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_LAYERS)], ...], Meta(max_length=MAX_LAYERS)]
    """Numbers of the layers in the model, in the order of their bytes in a page."""
    kind: KVKind
    kv_heads: int
    head_dim: int
    dtype: Annotated[str, Meta(max_length=32)]
    page_bytes: int
    value_dim: int = 0
    scale_dtype: Annotated[str, Meta(max_length=32)] | None = None
    """Type of the scales; None: there are none."""
    window: int = 0
    """Number of tokens that a layer of the group sees; 0: all. See ``mem_cache/window_pages.py``."""
    label_dim: int = 0
    labels: Annotated[str, Meta(max_length=32)] = ""
    """Digest of the channels that labels are copied from: equal digests mean equal channels."""

    @property
    def num_layers(self) -> int:
        """Number of layers that share the pages."""
        return len(self.layers)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of a layer's parts in a page, in order: "K", "V" (sparse: and "labels"), or "latent"."""
        return {"mha": ("K", "V"), "mla": ("latent",), "sparse": ("K", "V", "labels")}[self.kind]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Return the bytes that each of the ``parts`` takes of one layer in one page, scales included."""
        layer = self.page_bytes // max(self.num_layers, 1)
        if self.kind != "sparse":
            return (layer // len(self.parts),) * len(self.parts)
        keys = layer * self.head_dim // (2 * self.head_dim + self.label_dim)
        return keys, keys, layer - 2 * keys


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layout of KV pages. Two instances can exchange pages if their layouts differ at most in ``order``."""

    page_size: int
    groups: Annotated[tuple[KVGroup, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    order: KVOrder = "tokens"

    @property
    def page_bytes(self) -> int:
        """Return the sum of the bytes of one page of each group."""
        return sum(group.page_bytes for group in self.groups)

    @property
    def window_group(self) -> KVGroup | None:
        """The group with a window, if there is one."""
        return next((group for group in self.groups if group.window), None)


PagesByGroup = list[bytes]
"""Page numbers (int32) of each group of a layout, in its order."""


class MeasuredStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured step. The counts are those of ``scheduler/estimates/cost_model.py``."""

    decodes: int
    kv_tokens: int
    prompt_tokens: int
    prompt_pairs: float
    forward_ms: float


class MachineUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the machine that a worker uses, and the reason; shown by ``/server_info``."""

    threads: int = 0
    cores: list[int] = []
    """Cores that the compute threads run on."""
    bound: bool = False
    """Whether each compute thread is bound to a core of its own."""
    allowed: list[int] = []
    """Cores that the process may use."""
    cpu_quota: float | None = None
    """CPU time that the control groups allow, in cores."""
    numa_node: int | None = None
    """NUMA node that the worker stays on; None if there is only one."""
    spin_us: int = 0
    """Microseconds that a thread waits at a barrier before it sleeps."""
    kernel_level: str | None = None
    """Instruction set of the CPU kernels; None if they are not used."""
    memory_total: int = 0
    """Bytes that the control groups allow."""
    memory_free: int = 0
    """Free bytes within the control groups."""
    reason: str = "nothing is computed here"


class WorkerReady(Message):
    """Worker → scheduler: the model is loaded."""

    fingerprint: str
    """Identity of the weights: equal weights have equal fingerprints."""
    vocab_size: int
    context_length: int
    max_total_tokens: int
    """Number of usable slots (without page 0), a multiple of the page size."""
    layout: KVLayout
    device: str
    attention_backend: str
    weights_dtype: str
    backend_metadata: bytes
    """Opaque address of this worker's transfer backend, for the peer's ``ConnectPeer``."""
    load_seconds: dict[str, float]
    """Seconds that start-up spent, by phase."""
    measured: list[MeasuredStep] = []
    """Steps of several sizes, to estimate the time of the first request's steps."""
    step_weight_bytes: int = 0
    """Bytes of weights that a decode step reads; 0 if unknown."""
    machine: MachineUse = MachineUse()
    max_window_tokens: int = 0
    """Number of reserved slots of the group with a window; 0 without one."""
    host_pages: int = 0
    """Pages of the host tier; 0 without one."""
    limit_tokens: int = 0
    """Number of slots that the pools are reserved for and can grow to; 0: they cannot grow."""
    unreleasable: list[Unreleasable] = []
    """Memory that ``ReleaseMemory`` must not ask for."""
    memory: MemoryUse = MemoryUse()


class RowInit(msgspec.Struct, forbid_unknown_fields=True):
    """Start of a request in a row of the request table, with the sampler's parameters."""

    row: int
    prompt_len: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the output. They are banned until it has ``sampling.min_new_tokens`` tokens."""
    logprobs: int | None = None
    """Alternatives to list for each sampled token; None: no logprobs at all."""
    history: bytes | None = None
    """Prompt, then output (int32), only if penalties need them. The prompt has ``prompt_len`` tokens."""
    output: bytes = b""
    """Output so far (int32), only if a grammar needs it."""
    rid: str = ""
    """Name of the request, for the log alone."""


class SlotDelta(msgspec.Struct, array_like=True):
    """New slots (int32) of a row's positions from ``start`` on: a cached prefix, or replaced duplicates."""

    row: int
    start: int
    slots: bytes


class InputLogprobSpec(msgspec.Struct, array_like=True):
    """Prompt logprobs to return for one entry of a step.

    The logits at offset ``first + i`` of the entry's tokens score the prompt's next token, ``targets[i]`` (int32).
    """

    entry: int
    first: int
    targets: bytes
    top_num: int


class SendPages(Message):
    """Scheduler → worker: push whole pages to the decode of ``handover``.

    In a ``ForwardStep``, they are whole once the step has run. In a message of its own, they are whole already.
    """

    handover: HandoverId
    src_pages: PagesByGroup
    dst_pages: PagesByGroup
    """Pages of the decode, in the order of ``src_pages``."""
    last: bool
    """Whether these are the last pages of the hand-over."""
    checksum: bool = True
    """Whether slices get checksums, rather than 0."""


class SliceChecksum(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Checksum of a part of a hand-over that was written at once: ``count`` pages of a group from ``first`` on.

    It covers them page by page, in the order handed in, each from layer ``begin`` up to ``end``. ``algorithm``:
    xxh3_64, or, from device to device, the sum of words computed where they lie (``mem_cache/kv_pages/word_sum.py``).
    """

    first: Annotated[int, Meta(ge=0, le=MAX_PAGES)]
    count: Annotated[int, Meta(ge=1, le=MAX_PAGES)]
    begin: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    end: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    checksum: Annotated[int, Meta(ge=0)]
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)] = 0
    algorithm: Literal["xxh3", "words"] = "xxh3"


class ForwardStep(Message):
    """Scheduler → worker: one forward pass. Arrays are int32 bytes; there are ``B`` entries and ``T`` tokens in all.

    Entry ``b`` computes ``q_lens[b]`` tokens of the request in row ``rows[b]``, from position ``starts[b]`` on. Before
    the pass, the worker applies ``new_rows``, ``slot_deltas`` and ``window_pages``, in this order.
    """

    step_id: int
    rows: bytes
    starts: bytes
    q_lens: bytes
    use_last: bytes
    """1 for an entry with the row's last sampled token as its input, which the scheduler may not know yet. Its
    ``q_lens`` is 1, and ``input_ids`` has a 0 in place of the token.
    """
    sample: bytes
    """1 for an entry after which the worker samples the next token."""
    input_ids: bytes
    out_cache_loc: bytes
    """Slots (T) that the entries' KV is written to, one entry after another. The rows' positions map to them from now
    on.
    """
    new_rows: list[RowInit] = []
    slot_deltas: list[SlotDelta] = []
    input_logprobs: list[InputLogprobSpec] = []
    readouts: list[ReadoutSpec] = []
    pushes: list[SendPages] = []
    """Pages to send to peers, of this step or earlier ones. Those of one hand-over are in the order of its steps."""
    window_pages: bytes | UnsetType = UNSET
    """Pairs of int32: a page, and the windowed group's page with the same tokens (0: none). UNSET: no changes."""

    @property
    def summary(self) -> str:
        """Number of the step, its entries (rows of requests) and its tokens, as a text for traces."""
        return f"step {self.step_id}: {len(self.rows) // 4} entries, {len(self.out_cache_loc) // 4} tokens"


class StepResult(Message):
    """Worker → scheduler: result of a step."""

    step_id: int
    next_tokens: bytes
    """Sampled tokens (int32): one for each entry with ``sample`` set, in their order."""
    forward_ms: float
    logprobs: list[TokenLogprob | None] | None = None
    """Log-probabilities of ``next_tokens``; None for rows that did not ask for them."""
    input_logprobs: list[list[TokenLogprob]] = []
    """One list for each ``ForwardStep.input_logprobs``, in the order of its ``targets``."""
    readouts: list[bytes] = []
    """One vector (float32) for each ``ForwardStep.readouts`` with ``is_last`` set, in their order."""
    bad_entries: list[int] = []
    """Entries with logits that were not finite. Their tokens mean nothing, and their requests must fail."""
    compiled_kernels: int = 0
    """GPU kernels compiled since the previous result, while steps waited for them."""


class RankLoaded(Message):
    """Another rank → the lead of its host: its weights are loaded, or it has executed a command.

    Commands are ``MemoryCommand``, ``TrimPool`` and ``ProfileCommand``. ``error`` says why one failed.
    """

    rank: int
    weight_bytes: int
    error: str = ""


class RankSetup(Message):
    """Lead → the other ranks of its host: shared memory, as file descriptors of process ``pid``."""

    pid: int
    pool: int
    """KV pages of all ranks of the host."""
    num_pages: int
    """Number of these pages, with page 0."""
    exchange: int | None
    """Memory in which the ranks add up sums; None if they have no sums in common."""


class CaptureGraphs(Message):
    """Lead → the other ranks of its host: capture the graphs of decode steps. The lead does the same now."""


class AdmitPeer(Message):
    """Scheduler → worker: let ``peer`` write into our pool. Answered by ``PeerAdmitted`` or ``PeerFailed``."""

    peer: str
    """Epoch of the peer."""
    link: int
    """Number of the link, among those to all peers. A peer's next link comes after the ``PeerLinkDown`` of its last."""


class ConnectPeer(Message):
    """Scheduler → worker: admit ``peer`` and connect to its pool. Answered by ``PeerConnected`` or ``PeerFailed``."""

    peer: str
    link: int
    """Number of the link; see ``AdmitPeer``."""
    metadata: bytes
    """How the peer's transfer backend is reached."""


class DisconnectPeer(Message):
    """Scheduler → worker: end this link. ``PeerLinkDown`` follows once for each link, and may have been sent before."""

    peer: str
    link: int


class PeerAdmitted(Message):
    """Worker → scheduler: ``peer`` may write here."""

    peer: str
    link: int


class PeerConnected(Message):
    """Worker → scheduler: this worker can write into the pool of ``peer``."""

    peer: str
    link: int


class PeerFailed(Message):
    """Worker → scheduler: ``AdmitPeer`` or ``ConnectPeer`` failed. The scheduler has to disconnect the link."""

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
    """Worker → scheduler: the pages are not used any more. Unless ``error`` or ``cancelled``, all have arrived."""

    handover: HandoverId
    slices: list[SliceChecksum] = []
    """All slices in the order of their writes; empty for a backend that moves nothing."""
    nbytes: int = 0
    seconds: float = 0.0
    """Time spent pushing. It may be less than the time from ``began`` to ``ended``."""
    cancelled: bool = False
    error: str | None = None
    began: float = 0.0
    """Time of the first push (``time.monotonic()``); 0 if there was nothing to push."""
    ended: float = 0.0
    """Time of the last push (``time.monotonic()``); 0 if there was nothing to push."""


class SendProgress(Message):
    """Worker → scheduler: more pages of ``handover`` have landed. Sent now and then for long hand-overs."""

    handover: HandoverId
    nbytes: int
    """Bytes that have landed so far."""


class GrantPages(Message):
    """Scheduler → worker: ``peer`` may write these pages of our pools, until ``RevokePages`` of this hand-over.

    ``order``, ``checksum``: as in ``VerifyPages``, for devices, where pages are hashed and converted on arrival.
    """

    handover: HandoverId
    peer: str
    pages: PagesByGroup
    order: KVOrder | None = None
    checksum: bool = True


class RevokePages(Message):
    """Scheduler → worker: no peer may write the pages of ``handover`` any more."""

    handover: HandoverId
    are_checked: bool = False
    """Whether ``VerifyPages`` follows."""


class VerifyPages(Message):
    """Scheduler → worker: check that ``slices`` cover these pages of our pools. Answered by ``PagesVerified``.

    Pages in another order are converted in place once found right. They must not be used before the answer.
    """

    handover: HandoverId
    pages: PagesByGroup
    """Pages in the order of the hand-over."""
    slices: list[SliceChecksum]
    order: KVOrder | None = None
    """Order of the sender's elements; None: our own."""
    checksum: bool = True
    """Whether the checksums of the slices are compared as well."""


class PagesVerified(Message):
    """Worker → scheduler: whether the landed pages are the sender's. They are in our own order now."""

    handover: HandoverId
    ok: bool
    error: str = ""
    """Why the pages could not be granted (without a ``VerifyPages``) or checked. Empty if they were checked."""


SendCommand = ConnectPeer | SendPages | CancelSend
"""Commands that share one order with the steps and their pushes, so that no push uses a later link."""
ReceiveCommand = AdmitPeer | DisconnectPeer | GrantPages | RevokePages | VerifyPages
"""Commands that must not wait for a step, because peers and landed requests wait for them."""
TransferCommand = SendCommand | ReceiveCommand
PeerCommand = AdmitPeer | ConnectPeer | DisconnectPeer
PeerEvent = PeerAdmitted | PeerConnected | PeerFailed | PeerLinkDown
TransferEvent = PeerEvent | SendProgress | SendEnded | PagesVerified
WorkerCommand = (
    ForwardStep
    | SendCommand
    | TierCommand
    | MemoryCommand
    | TrimPool
    | HashPages
    | ProfileCommand
    | PrepareGrammar
    | ForgetGrammar
)
WorkerEvent = (
    WorkerReady
    | StepResult
    | TransferEvent
    | TierEvent
    | MemoryChanged
    | PoolTrimmed
    | PagesHashed
    | ProfileEvent
    | GrammarPrepared
)
FollowerCommand = RankSetup | ForwardStep | CaptureGraphs | MemoryCommand | TrimPool | ProfileCommand
