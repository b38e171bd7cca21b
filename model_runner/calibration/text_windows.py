"""Text that models are measured with, cut into windows of tokens.

The default text is English that every Python installation has, the language reference of ``pydoc``. Other versions of
Python have other texts.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

from ...model_files.text.load import load_tokenizer
from ..options import WorkerOptions


def read_windows(options: WorkerOptions, tokens: int, window: int, skip: int = 0, text: str | None = None) -> Tensor:
    """Tokenise a text and return it in windows, [windows, W] int64, of ``window`` tokens each, without a BOS token.

    ``options`` name the model and its tokenizer. The windows hold at most ``tokens`` tokens after the first ``skip``
    ones; tokens that fill no window are left out. ``text`` replaces the default text.
    """
    if text is None:
        text = "".join(topics[name] for name in sorted(topics))
    tokenizer = load_tokenizer(options)
    ids = tokenizer.encode_batch([text], add_special_tokens=False)[0][skip : skip + tokens]
    whole = len(ids) // window
    return torch.tensor(ids[: whole * window], dtype=torch.int64).view(whole, window)
