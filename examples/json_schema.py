"""Get an answer that matches a JSON schema: facts of a sentence as an object.

python examples/json_schema.py [URL]
"""

import json
import sys

import httpx

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
SENTENCE = "Maria is 34 years old and lives in Lisbon."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask once, and print what the model filled in."""
    body = {
        "messages": [{"role": "user", "content": f"{SENTENCE}\nWrite the person's name, age and city as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        "temperature": 0,
        "max_tokens": 128,
    }
    response = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=300)
    if response.is_error:
        sys.exit(f"{URL} answers {response.status_code}: {response.text}")
    choice = response.json()["choices"][0]
    # The server never chooses a token that breaks the schema. But max_tokens can cut the answer.
    if choice["finish_reason"] != "stop":
        sys.exit(f"The answer was cut ({choice['finish_reason']}): {choice['message']['content']}")
    person = json.loads(choice["message"]["content"])
    print(f"name: {person['name']}\nage:  {person['age']}\ncity: {person['city']}")


try:
    main()
except httpx.TransportError as error:
    sys.exit(f"No server is ready at {URL} ({error}). Start one with: make run")
