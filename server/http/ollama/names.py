"""Names of the model in Ollama's API, where each has a tag: ``llama3:latest``."""

from __future__ import annotations

from ....messages.decode import shown
from ..errors import ApiError
from ..served_model import LATEST, ServedModel


def answered_name(asked: str | None, model: ServedModel) -> str:
    """Return the model's name for answers: as the client wrote it, or the first one if it wrote none.

    Raises ``ApiError`` 404 if the model that it asks for is not the one served.
    """
    if model.answers_to(asked):
        return asked or model.name
    message = f'model "{shown(asked or "")}" not found; "{tagged(model.name)}" is served'
    raise ApiError(404, message, param="model", code="model_not_found")


def tagged(name: str) -> str:
    """Return ``name`` with a tag. Names without one get ``LATEST``, since clients take names apart at the colon."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST
