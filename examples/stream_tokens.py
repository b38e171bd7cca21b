"""Stream an answer of POST /generate, and show where its time went.

python examples/stream_tokens.py [URL]
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
BODY = {
    "text": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "sampling_params": {"temperature": 0, "max_new_tokens": 64},
    "stream": True,
    "incremental": True,
}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a stream. Exits if the stream has an error or no end."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):  # other lines are empty, or comments that keep the connection open
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                sys.exit(f"\nThe server reports: {event['error']['message']}")
            yield event
    sys.exit("\nThe stream broke off.")


def main() -> None:
    """Print the text as it arrives, then the phases of the request."""
    with httpx.stream("POST", f"{URL}/generate", json=BODY, timeout=300) as response:
        if response.is_error:
            sys.exit(f"{URL} answers {response.status_code}: {response.read().decode()}")
        for event in events(response):
            print(event["text"], end="", flush=True)
    meta = event["meta_info"]  # the last event has the timing of the whole request
    print(f"\n\n{'phase':10}{'instance':10}{'process':12}{'ms':>8}")
    for phase in meta["timing"]["phases"]:
        print(f"{phase['phase']:10}{phase['at']:10}{phase['process']:12}{phase['ms']:8.1f}")
    print(f"{'total':32}{meta['timing']['total_ms']:8.1f}")
    print(f"{meta['completion_tokens']} tokens, the first one after {meta['timing']['first_token_ms']:.1f} ms")


try:
    main()
except httpx.TransportError as error:
    sys.exit(f"No server is ready at {URL} ({error}). Start one with: make run")
