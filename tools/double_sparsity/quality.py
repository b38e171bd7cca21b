"""Measures what attention to few tokens costs in quality.

    python -P -m tools.double_sparsity.quality --channels FILE

The text is the default one of ``text_windows.py``, after the part that ``pdserve calibrate`` reads. In each window the
first half is a prompt. The second half is computed as if it had been generated, with the given tokens.

All passes use the torch engine and the same weights. They are compared with attention to all tokens, over the tokens of
the second half:

- perplexity: the exponential of the mean of -ln p(next token)
- divergence: the mean of KL(all || few), in nats per token
- same: how often the most likely next token is the same
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.model_runner.calibration.calibrate import whole_text
from pdserve.model_runner.calibration.options import CalibrateOptions
from pdserve.model_runner.calibration.text_windows import read_windows
from pdserve.model_runner.engines.load import load_model
from pdserve.model_runner.engines.torch import TorchEngine
from pdserve.server.options import ServerOptions

from ..kernels.perplexity import ROWS


class Way(NamedTuple):
    """``chosen`` tokens by labels of ``channels``; 0: all of them."""

    chosen: int
    channels: int

    def __str__(self) -> str:
        return f"{self.chosen} tokens, {self.channels} channels" if self.chosen else "all tokens"


class Score(NamedTuple):
    """Sums over tokens, see the module; of -ln p for ``loss``."""

    loss: float
    divergence: float
    same: float


def main() -> None:
    """Measure perplexity and divergence for each number of chosen tokens and channels, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", required=True, help="file of `pdserve calibrate`")
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--chosen", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--label", type=int, nargs="+", default=[8, 16, 32], help="channels of a label")
    args = parser.parse_args()
    options = ServerOptions(model_path=args.model_path)
    skip = CalibrateOptions().tokens
    windows = read_windows(options, args.windows * args.window, args.window, skip)
    ways = [Way(0, 0), *(Way(chosen, label) for chosen in args.chosen for label in args.label)]
    scored = args.window // 2 * len(windows)
    print(f"{args.model_path}: {scored} tokens behind as many, in {len(windows)} windows of {args.window}")
    print(f"\n{'':28} {'perplexity':>11} {'ratio':>9} {'KL (nats per token)':>20} {'same':>8}")
    scores = measure(args.model_path, args.channels, ways, windows)
    for way, score in scores.items():
        perplexity, ratio = math.exp(score.loss / scored), math.exp((score.loss - scores[ways[0]].loss) / scored)
        print(
            f"{way!s:28} {perplexity:11.4f} {ratio:9.5f} {score.divergence / scored:20.2e} {score.same / scored:8.4f}"
        )


def measure(model_path: str, channels: str, ways: list[Way], windows: Tensor) -> dict[Way, Score]:
    """Return the sums over ``windows`` for each of ``ways``, of which the first attends to all tokens.

    The divergence of each is from the first one's logits. ``channels``: file of `pdserve calibrate`.
    """
    expected = list(_logits(model_path, channels, ways[0], windows))
    scores = {}
    for way in ways:
        found = expected if way is ways[0] else _logits(model_path, channels, way, windows)
        scored = [_compare(*three) for three in zip(found, expected, windows, strict=True)]
        scores[way] = Score(*torch.stack(scored).sum(0).tolist())
    return scores


def _logits(model_path: str, channels: str, way: Way, windows: Tensor) -> Iterator[Tensor]:
    """Yield for each window the logits that score its second half, [w / 2, V]."""
    width = windows.shape[1]
    options = ServerOptions(
        model_path=model_path,
        device="cpu",
        attention_backend="torch",
        quantization="none",
        max_total_tokens=width + ServerOptions().page_size,
    )
    if way.chosen:
        options = replace(
            options,
            enable_double_sparsity=True,
            ds_channel_config_path=channels,
            ds_heavy_token_num=way.chosen,
            ds_heavy_channel_num=way.channels,
            ds_sparse_decode_threshold=0,
        )
    engine = load_model(options).engine
    assert isinstance(engine, TorchEngine)
    half = width // 2
    for ids in windows:
        # The prompt's last token attends to all of it, so its logits for the next token don't differ.
        yield engine.forward(whole_text(ids, options.page_size, half, half + 1))[:-1]


def _compare(logits: Tensor, truth: Tensor, ids: Tensor) -> Tensor:
    """Return the values of ``Score`` for one window, [3] float64.

    ``logits`` are compared with ``truth``, those of attention to all tokens. They score the last tokens of ``ids`` [w].
    """
    sums = torch.zeros(3, dtype=torch.float64)
    blocks = (torch.split(tensor, ROWS) for tensor in (logits, truth, ids[-len(truth) :]))
    for few, everything, wanted in zip(*blocks, strict=True):
        log_p, log_q = few.double().log_softmax(-1), everything.double().log_softmax(-1)
        sums[0] -= log_p.gather(1, wanted[:, None]).sum()
        sums[1] += (log_q.exp() * (log_q - log_p)).sum()
        sums[2] += (few.argmax(-1) == everything.argmax(-1)).sum()
    return sums


if __name__ == "__main__":
    main()
