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
    """Print ``meta_info`` of a finished answer as a table: phases, the process that spent each, and their sum."""
    timing, tokens, cached = meta["timing"], meta["completion_tokens"], meta["cached_tokens"]
    per_token = timing["decode_ms"] / max(1, tokens - 1)
    notes = {
        "tokenize": "text to tokens",
        "queue": "waiting for memory, a turn and the other instance",
        "prefill": f"{meta['prompt_tokens']} prompt tokens, {cached} of them cached",
        "transfer": f"waiting for {timing['transfer_bytes']:,} bytes of KV",
        "decode": f"{tokens} tokens, {per_token:.1f} ms each after the first",
        "reply": "the last token to text",
    }
    print("\n")
    print(f"  {'phase':<10}{'instance':<10}{'process':<12}{'ms':>8}")
    for spent in timing["phases"]:
        phase, at, process, milliseconds = spent["phase"], spent["at"], spent["process"], spent["ms"]
        print(f"  {phase:<10}{at:<10}{process:<12}{milliseconds:>8.1f}   {notes.get(phase, '')}")
    reason = meta["finish_reason"]["type"]
    ended = {"length": "at max_new_tokens", "stop": "by itself"}.get(reason, f"by {reason}")
    first = timing["first_token_ms"]
    print(f"  {'total':<32}{timing['total_ms']:>8.1f}   first token after {first:.1f} ms; the answer ended {ended}")


def main() -> None:
    """Show, judge."""
    # Ctrl-C ends the demo: the script that reads our exit code says the rest. In the background it is ignored.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
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
