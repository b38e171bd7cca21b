"""Checks the model that a request names."""

from __future__ import annotations

from ....messages.decode import shown
from ..errors import ApiError
from ..served_model import ServedModel


def check_model(asked: str | None, model: ServedModel) -> None:
    """Raise ``ApiError`` 404 if a client asks for a model that is not the one served.

    None asks for no particular one.
    """
    if not model.answers_to(asked):
        message = f'model: "{shown(asked or "")}" is not served here; "{model.name}" is'
        raise ApiError(404, message, param="model", code="model_not_found")
