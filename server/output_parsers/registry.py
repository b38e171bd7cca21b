"""Every output format. A new one is a file and a line here."""

from __future__ import annotations

from .base import OutputFormat
from .deepseek import DEEPSEEK
from .dsml import DSML
from .gemma4 import GEMMA4
from .glm import GLM
from .harmony import HARMONY
from .hermes import HERMES
from .json_list import GRANITE, PHI4
from .kimi_k2 import KIMI_K2
from .llama_json import LLAMA_JSON
from .mistral import MISTRAL
from .pythonic import PYTHONIC
from .qwen_xml import QWEN_XML
from .think import THINK

HARMONY_NAME = HARMONY.name

FORMATS: tuple[OutputFormat, ...] = (
    HARMONY,
    DSML,
    DEEPSEEK,
    KIMI_K2,
    GEMMA4,
    QWEN_XML,
    GLM,
    MISTRAL,
    HERMES,
    GRANITE,
    PHI4,
    LLAMA_JSON,
    PYTHONIC,
    THINK,
)
"""In the order in which templates are tried: the first one with its signs is the model's."""
