"""What can go wrong between ``--model-path`` and a loaded model. No retry helps; each message says what does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

OTHER_WEIGHTS = "the files hold other weights than at the start; restart to serve those"
"""Message of ``InvalidWeights`` for weights that are loaded again."""


BROKEN_VALUES = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What may be raised where a value is of another type or size than it should be."""
MAX_MESSAGE = 500
"""Maximum characters of a message, which may have a value of any size."""
MAX_REASON = 200
"""Maximum characters of another library's message that is quoted."""


def brief(error: BaseException) -> str:
    """Return an error's message on one line, without its full stop and cut to ``MAX_REASON`` characters.

    It is the name of the error's type if there is no message.
    """
    return shortened(" ".join(str(error).split()).rstrip(".") or type(error).__name__, MAX_REASON)


def shortened(text: str, size: int = MAX_REASON) -> str:
    """Return ``text``, cut to ``size`` characters with "…" behind them if it is longer."""
    return text if len(text) <= size else f"{text[:size]}…"


class ModelError(Exception):
    """Base of this folder's errors: the model can't be served as asked."""


class ModelNotFound(ModelError):
    """``--model-path`` names nothing that is here or that can be fetched."""


class NotDownloaded(ModelNotFound):
    """The name may well be one of the hub's, but nothing of it is here, and it was not to be fetched."""


class UnsupportedModel(ModelError):
    """The model is there, but its architecture or one of its features has no implementation here."""


class InvalidWeights(ModelError):
    """The weights are damaged, incomplete, or do not fit the model's own config."""


def unusable(key: str, value: object, reason: str) -> UnsupportedModel:
    """Return the error for a ``value`` of a config's ``key`` that can't be used for this ``reason``."""
    advice = "correct it, or download the file again"
    return UnsupportedModel(f"{key} {shortened(repr(value))} can't be used: {reason}; {advice}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file or folder to the message of every ``ModelError`` of the block that does not name it yet."""
    try:
        yield
    except ModelError as e:
        if str(path) in str(e):
            raise
        raise type(e)(f"{path}: {shortened(str(e), MAX_MESSAGE)}") from e


class KeyValues(Protocol):
    """Values of a file by key."""

    last_key: str
    """Key that was asked for last."""

    def get(self, key: str) -> Any:
        """Return the value of ``key``, None if it is missing, and make ``key`` the ``last_key``."""


@contextmanager
def reading_keys(values: KeyValues) -> Iterator[None]:
    """Turn errors of the block about unusable values into ``UnsupportedModel``, which names the key asked for last.

    A ``KeyError`` passes unchanged.
    """
    try:
        yield
    except KeyError:
        raise
    except BROKEN_VALUES as e:
        key = values.last_key
        raise unusable(key, values.get(key), brief(e)) from e


def real(key: str, value: object) -> float:
    """Return the number ``value`` of ``key``; raises ``UnsupportedModel`` for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise unusable(key, value, "it must be a number")
    return float(value)


def positive(key: str, value: float) -> float:
    """Return the ``value`` of ``key`` if it is finite and above 0; raises ``UnsupportedModel`` otherwise."""
    if not 0 < value < math.inf:
        raise UnsupportedModel(f"{key} {value} is not supported: it must be a finite number above 0")
    return value


def not_negative(key: str, value: float) -> float:
    """Return the ``value`` of ``key`` if it is finite and 0 at least; raises ``UnsupportedModel`` otherwise."""
    if not 0 <= value < math.inf:
        raise UnsupportedModel(f"{key} {value} is not supported: it must be a finite number, 0 at least")
    return value


def whole(value: Any) -> int:
    """Return a value as an integer: 3 for 3.0, for example.

    Raises ``TypeError`` or ``ValueError`` for a truth value, a fraction, or what is no number.
    """
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("it is no whole number")
    return int(value)


@contextmanager
def reading(file: Path, what: str) -> Iterator[None]:
    """Raise a ``ModelError`` that names ``file`` if the block finds one of its values missing or unusable.

    ``what``: what the message says of the file, such as "is no usable model config".
    """
    try:
        with naming(file):
            yield
    except BROKEN_VALUES as e:
        reason = f"it lacks {e}" if isinstance(e, KeyError) else f"{type(e).__name__}: {brief(e)}"
        raise UnsupportedModel(f"{file} {what}: {reason}; correct it, or download it again") from e
