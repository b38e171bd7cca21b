"""Has a server write JSON for the schemas of a suite, and validates the complete answers with jsonschema.

    PYTHONPATH=. .venv/bin/python -P -m tools.schema_suites.generate URL FOLDER... --count 2000

Schemas are drawn from the files of the folders (JSONSchemaBench's ``data`` or ``maskbench/data``), by a seed. Ends
with 1 if a complete answer is not valid.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from tqdm import tqdm

SECONDS = 600.0
"""Time limit of one request."""


def schemas(folders: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each JSON schema in the JSON files below ``folders``, with its file's name."""
    for folder in folders:
        for file in sorted(folder.rglob("*.json")):
            content = json.loads(file.read_text(encoding="utf-8"))
            schema = content["schema"] if "tests" in content else content
            if isinstance(schema, dict):
                yield file.name, schema


def ask(client: httpx.Client, url: str, schema: dict[str, Any], seed: int, most: int) -> tuple[str, str]:
    """Ask the server at ``url`` for JSON that matches ``schema``; return the outcome in words and a failure's details.

    ``most``: limit of the answer in tokens. A complete answer is validated with jsonschema.
    """
    prompt = f"Write a JSON document that matches this schema: {json.dumps(schema)[:1500]}"
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "document", "schema": schema}},
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": most,
    }
    response = client.post(f"{url}/v1/chat/completions", json=body)
    if response.status_code != 200:
        return f"refused with {response.status_code}", response.json()["error"]["message"][:120]
    choice = response.json()["choices"][0]
    if choice["finish_reason"] != "stop":
        return "cut by the limit", ""
    try:
        answer = json.loads(choice["message"]["content"])
        checker = jsonschema.validators.validator_for(schema)
        error = jsonschema.exceptions.best_match(
            checker(schema, format_checker=checker.FORMAT_CHECKER).iter_errors(answer)
        )
    except json.JSONDecodeError as e:
        return "not JSON", str(e)
    except Exception as e:  # noqa: BLE001  # the validator refuses some schemas of the suite, in its own ways
        return "complete, not checked", f"{type(e).__name__}: {e}"[:120]
    return (
        ("valid", "")
        if error is None
        else ("not valid", f"{error.message[:120]}: {choice['message']['content'][:200]}")
    )


def main() -> int:
    """Send the requests and print how many had each outcome. Return 1 if a complete answer is not valid."""
    parser = argparse.ArgumentParser(prog="python -P -m tools.schema_suites.generate", description=__doc__)
    parser.add_argument("url", help="server or router")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of schemas")
    parser.add_argument("--count", type=int, default=2000, help="schemas to draw")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw and of the answers")
    parser.add_argument("--at-once", type=int, default=16, help="requests at a time")
    parser.add_argument("--max-tokens", type=int, default=1024, help="limit of an answer")
    args = parser.parse_args()
    found = list(schemas(args.folders))
    drawn = random.Random(args.seed).sample(found, min(args.count, len(found)))
    ends: Counter[str] = Counter()
    with httpx.Client(timeout=SECONDS, trust_env=False) as client, ThreadPoolExecutor(args.at_once) as pool:
        asked = pool.map(
            lambda i: (drawn[i][0], *ask(client, args.url, drawn[i][1], args.seed + i, args.max_tokens)),
            range(len(drawn)),
        )
        for name, end, details in tqdm(asked, total=len(drawn), disable=None):
            ends[end] += 1
            if end in ("not valid", "not JSON", "complete, not checked") or end.startswith("refused with 5"):
                print(f"{end}: {name}: {details}", flush=True)
    for end, count in ends.most_common():
        print(f"{count:5} {end}")
    return int(bool(ends["not valid"] + ends["not JSON"]))


if __name__ == "__main__":
    sys.exit(main())
