"""Shows an answer of ``POST /generate`` with ``"stream": true`` (on stdin) as it grows, then where its time went.

Exit code 1 unless the answer is complete and its KV really went from a prefill to a decode instance.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

PREFIX = "data: "
DONE = "[DONE]"


def show_text() -> dict[str, Any]:
    """Print text as it arrives; returns the last event, {} where there was none."""
    last: dict[str, Any] = {}
    shown = 0
    for line in sys.stdin:
        if not line.startswith(PREFIX):
            # An answer that is no stream is an error, and says why.
            print(line.strip(), end="")
            continue
        content = line.removeprefix(PREFIX).strip()
        if content == DONE:
            return last
        last = json.loads(content)
        if "error" in last:
            sys.exit(f"\n{last['error']['message']}")
        # Each event holds the whole text so far.
        print(last["text"][shown:], end="", flush=True)
        shown = len(last["text"])
    sys.exit("\nthe stream broke off")


def show_timing(meta: dict[str, Any]) -> None:
    """Print ``meta_info`` of a finished answer as a table."""
    timing, tokens, cached = meta["timing"], meta["completion_tokens"], meta["cached_tokens"]
    per_token = timing["decode_ms"] / max(1, tokens - 1)
    ended = meta["finish_reason"]["type"]
    rows = [
        ("queue", timing["queue_ms"], "waiting for a turn and for memory"),
        ("prefill", timing["prefill_ms"], f"{meta['prompt_tokens']} prompt tokens, {cached} of them cached"),
        ("transfer", timing["transfer_ms"], f"{timing['transfer_bytes']:,} bytes of KV, prefill to decode"),
        ("decode", timing["decode_ms"], f"{tokens} tokens, {per_token:.1f} ms each after the first"),
        ("detokenize", timing["detokenize_ms"], "beside the decode"),
        ("end to end", meta["e2e_latency"] * 1000, f"as the decode instance saw it; ended by {ended}"),
    ]
    print("\n")
    for name, milliseconds, note in rows:
        print(f"  {name:<12}{milliseconds:>9.1f} ms   {note}")


def main() -> None:
    """Show, judge."""
    # Ctrl-C ends the demo: the script that reads our exit code says the rest.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    last = show_text()
    finish = last["meta_info"]["finish_reason"] if last else None
    if not finish or finish["type"] == "abort" or not last["text"].strip():
        sys.exit(f"\nthe answer is not complete: {finish}")
    show_timing(last["meta_info"])
    if not last["meta_info"]["timing"]["transfer_bytes"]:
        sys.exit("no KV was handed over: this answer did not come from a prefill-decode pair")


if __name__ == "__main__":
    main()
