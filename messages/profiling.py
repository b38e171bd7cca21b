"""Profiles of the model workers: what HTTP asks, what the scheduler tells the worker, and what comes back.

``StartProfile`` and ``StopProfile`` travel in one order with the steps, so that a profile holds the steps between them.
"""

from __future__ import annotations

from typing import Literal, get_args

from .base import Message
from .question import Answer, Question

ProfileActivity = Literal["CPU", "GPU"]
ALL_ACTIVITIES: tuple[ProfileActivity, ...] = get_args(ProfileActivity)
MAX_STEPS = 100
"""Maximum steps of a profile: its events are in the worker's memory until it ends."""
MAX_STACK_STEPS = 20
"""Maximum steps of a profile with Python stacks, which has some ten times the events."""


class ProfileResult(Answer):
    """Scheduler → HTTP: a profile that was started, or one that has ended."""

    folder: str
    files: list[str]
    """Paths of the files that will be written, or that were."""
    activities: list[ProfileActivity]
    steps: int
    """Steps that will be recorded, or that were."""
    seconds: float
    """Maximum duration; after the end, the duration."""
    nbytes: int = 0
    """Length of the files."""
    ended_by: str = ""
    """What ended it; "" while it runs."""


class StartProfileReq(Question[ProfileResult]):
    """HTTP → scheduler: record the next ``num_steps`` steps, into files in the folder ``name``.

    ``activities``: none means all that the device has. ``with_stack``: record Python calls, too. ``record_shapes``:
    record the shapes of each operation's inputs.
    """

    name: str
    num_steps: int
    activities: list[ProfileActivity] = []
    with_stack: bool = False
    record_shapes: bool = False


class StopProfileReq(Question[ProfileResult]):
    """HTTP → scheduler: end the profile now and say what it wrote."""


class StartProfile(Message):
    """Scheduler → worker, and lead → other ranks: begin to record. The worker answers with ``ProfileStarted``."""

    name: str
    activities: list[ProfileActivity]
    with_stack: bool
    record_shapes: bool


class StopProfile(Message):
    """Scheduler → worker, and lead → other ranks: end the recording and write it.

    The worker answers with ``ProfileWritten``.
    """


class ProfileStarted(Message):
    """Worker → scheduler: it records ``activities``, and will write ``files``; or not, for the reason in ``error``.

    ``status``: the one of HTTP that goes with ``error``.
    """

    folder: str = ""
    files: list[str] = []
    activities: list[ProfileActivity] = []
    status: int = 200
    error: str = ""


class ProfileWritten(Message):
    """Worker → scheduler: the recording has ended. ``files`` are there, ``nbytes`` in all; ``error``: what is not."""

    files: list[str] = []
    nbytes: int = 0
    error: str = ""


ProfileCommand = StartProfile | StopProfile
ProfileEvent = ProfileStarted | ProfileWritten
