"""Let the model call a function of this program, and answer with its result.

python examples/call_tools.py [URL]

The model must have been trained for tools: pdserve up --model-path Qwen/Qwen3-0.6B. SmolLM2-135M was not.
"""

import json
import sys
from typing import Any

import httpx

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
TOOL = {
    "name": "get_weather",
    "description": "Return the weather of a city now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def get_weather(city: str) -> dict[str, Any]:
    """Return the weather of a city. A real program would ask a weather service."""
    return {"city": city, "celsius": 18, "sky": "clear"}


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model's next message. Exits if the server refuses the request."""
    body = {"messages": messages, "tools": [{"type": "function", "function": TOOL}], "temperature": 0}
    response = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=300)
    if response.is_error:
        sys.exit(f"{URL} answers {response.status_code}: {response.text}")
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def main() -> None:
    """Ask, run the calls in the answer, send their results, and print the final answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris right now?"}]
    message = ask(messages)
    if not message.get("tool_calls"):
        sys.exit(f"The model called no tool. It answered: {message['content']}")
    messages.append(message)
    for call in message["tool_calls"]:
        print(f"call: {call['function']['name']}({call['function']['arguments']})")
        result = json.dumps(get_weather(**json.loads(call["function"]["arguments"])))
        print(f"result: {result}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    print(f"answer: {ask(messages)['content']}")


try:
    main()
except httpx.TransportError as error:
    sys.exit(f"No server is ready at {URL} ({error}). Start one with: make run")
