"""The messages that each channel of an instance declares. A channel has the name of the process that receives from it.

HTTP ─▶ tokenizer ─▶ scheduler ─▶ worker, transfer   scheduler ─▶ detokenizer ─▶ http
                         ▲  ▲───── worker_events      ▲ tokenizer errors ─────▲
                         └──────── StopReq from the detokenizer
                                                       worker ─▶ worker-1 … (other tensor-parallel ranks) ─▶ lead
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from . import control, kv_debug, memory, moves, profiling, sessions, text  # noqa: F401  each declares questions
from .control import Drain, Drained, Ready, StopAsked
from .metrics import SchedulerMetrics
from .moves import ReqArrived, ReqMoved
from .outputs import ReqError, TextBatch, TokenBatch
from .question import Answer, Question, TextAnswer, TextQuestion, subclasses
from .requests import AbortReq, ChatRendered, ForkedReq, GenerateReq, StopReq, TokenizeReq
from .sessions import ReleaseReq, ResumeReq
from .worker import FollowerCommand, RankLoaded, ReceiveCommand, WorkerCommand, WorkerEvent

if TYPE_CHECKING:
    AnyQuestion = Question[Any]
    AnyAnswer = Answer
    AnyTextQuestion = TextQuestion[Any]
    AnyTextAnswer = TextAnswer
else:
    # A decoder needs each class by itself. Every subclass in the modules above is declared, so no list can miss one.
    AnyQuestion = Union[*(kind for kind in subclasses(Question) if not issubclass(kind, TextQuestion))]
    AnyAnswer = Union[*(kind for kind in subclasses(Answer) if not issubclass(kind, TextAnswer))]
    AnyTextQuestion = Union[*subclasses(TextQuestion)]
    AnyTextAnswer = Union[*subclasses(TextAnswer)]

Session = ResumeReq | ReleaseReq
Moved = ReqMoved | ReqArrived

ToTokenizer = TokenizeReq | ChatRendered | AbortReq | Session | AnyQuestion | AnyTextQuestion
ToScheduler = GenerateReq | ForkedReq | AbortReq | StopReq | Session | AnyQuestion | Drain
ToWorker = WorkerCommand
ToTransfer = ReceiveCommand
ToFollower = FollowerCommand
ToLead = RankLoaded
ToSchedulerFromWorker = WorkerEvent
ToDetokenizer = TokenBatch | ReqError | Moved | AnyAnswer | SchedulerMetrics | Drained
ToHttp = TextBatch | ReqError | Moved | AnyAnswer | AnyTextAnswer | SchedulerMetrics | Drained
ToSupervisor = Ready | Drained | StopAsked
