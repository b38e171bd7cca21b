"""The options of ``pdserve calibrate``, declared once; the command line and YAML files read them here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class CalibrateOptionsError(ValueError):
    """An option that can't work; the message says what to write instead."""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of ``pdserve calibrate``.

    Parameters
    ----------
    model_path
        Model to calibrate, as pdserve server takes it.
    out
        File to write: what pdserve server takes as --ds-channel-config-path.
    tokenizer_path
        Folder, .gguf file or hub name of the tokenizer; default: the model's own.
    text
        Text to run through the model, like what it will be asked for; default: the language reference that comes with
        Python.
    tokens
        Tokens of the text to look at, from its beginning.
    window
        Tokens that the model sees at a time.
    dtype
        Type of weights and activations; auto takes bfloat16 (float16 on a GPU without it).
    device
        cpu or cuda; auto takes cuda where there is one.
    """

    model_path: str = "smollm2"
    out: Path = Path("channels.json")
    tokenizer_path: str | None = None
    text: Path | None = None
    tokens: int = 4096
    window: int = 2048
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def check(self) -> None:
        """Raise ``CalibrateOptionsError`` for wrong token counts, a missing text file or a missing output folder."""
        if not 2 <= self.window <= self.tokens:
            raise CalibrateOptionsError("--window is at least 2 and at most --tokens")
        if self.text is not None and not self.text.is_file():
            raise CalibrateOptionsError(f"--text {self.text}: there is no such file")
        if not self.out.parent.is_dir():
            raise CalibrateOptionsError(f"--out {self.out}: there is no folder {self.out.parent}")
