"""The messages that each channel of an instance declares. A channel has the name of the process that receives from it.

HTTP ─▶ tokenizer ─▶ scheduler ─▶ worker, transfer   scheduler ─▶ detokenizer ─▶ http
                         ▲  ▲───── worker_events      ▲ tokenizer errors ─────▲
                         └──────── StopReq from the detokenizer
                                                       worker ─▶ worker-1 … (other tensor-parallel ranks) ─▶ lead
"""

from __future__ import annotations

from .control import (
    Drain,
    Drained,
    FlushCacheReq,
    FlushCacheResult,
    Ping,
    Pong,
    Ready,
    RoleReq,
    RoleResult,
    ServerInfo,
    ServerInfoReq,
    StopAsked,
    Transfers,
    TransfersReq,
)
from .kv_debug import KVHashes, KVHashesReq
from .memory import MemoryReq, MemoryResult, ResizeReq, ResizeResult
from .metrics import SchedulerMetrics
from .moves import MigrateReq, MigrateResult, ReqArrived, ReqMoved
from .outputs import ReqError, TextBatch, TokenBatch
from .profiling import ProfileReq, ProfileResult
from .requests import AbortReq, ChatRendered, ForkedReq, GenerateReq, StopReq, TokenizeReq
from .sessions import ReleaseReq, ResumeReq, SnapshotReq, SnapshotResult
from .text import TextAnswer, TextQuestion
from .worker import FollowerCommand, RankLoaded, ReceiveCommand, WorkerCommand, WorkerEvent

Question = (
    Ping
    | FlushCacheReq
    | ServerInfoReq
    | TransfersReq
    | MigrateReq
    | RoleReq
    | MemoryReq
    | ResizeReq
    | SnapshotReq
    | KVHashesReq
    | ProfileReq
)
Answer = (
    Pong
    | FlushCacheResult
    | ServerInfo
    | Transfers
    | MigrateResult
    | RoleResult
    | MemoryResult
    | ResizeResult
    | SnapshotResult
    | KVHashes
    | ProfileResult
)
Session = ResumeReq | ReleaseReq
Moved = ReqMoved | ReqArrived

ToTokenizer = TokenizeReq | ChatRendered | AbortReq | Session | Question | TextQuestion
ToScheduler = GenerateReq | ForkedReq | AbortReq | StopReq | Session | Question | Drain
ToWorker = WorkerCommand
ToTransfer = ReceiveCommand
ToFollower = FollowerCommand
ToLead = RankLoaded
ToSchedulerFromWorker = WorkerEvent
ToDetokenizer = TokenBatch | ReqError | Moved | Answer | SchedulerMetrics | Drained
ToHttp = TextBatch | ReqError | Moved | Answer | TextAnswer | SchedulerMetrics | Drained
ToSupervisor = Ready | Drained | StopAsked
