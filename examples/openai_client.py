"""Chat with the server by the package openai: one answer whole, one as a stream.

pip install openai
python examples/openai_client.py [URL]
"""

import sys

try:
    from openai import APIConnectionError, OpenAI
except ImportError:
    sys.exit("The package openai is missing. Install it with: pip install openai")

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


def main() -> None:
    """Ask two questions, the second one in the same conversation."""
    # A server without API keys takes any key, but the package wants one.
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    model = client.models.list().data[0].id
    print(f"model: {model}")

    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=model, messages=conversation, temperature=0, max_tokens=64)
    answer = whole.choices[0].message.content
    print(f"whole answer: {answer}")

    conversation += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And of Italy?"}]
    print("stream: ", end="")
    for chunk in client.chat.completions.create(
        model=model,
        messages=conversation,
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:  # the last chunk has no choice, but the usage
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} output tokens")


try:
    main()
except APIConnectionError as error:
    sys.exit(f"No server is ready at {URL} ({error.__cause__}). Start one with: make run")
