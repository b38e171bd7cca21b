"""A model that follows a script, with a real tokenizer and a chat template in Qwen's manner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .tiny_model import CONFIG

NAME = ("--served-model-name", "scripted")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Answer with <tool_call>{"name": .., "arguments": ..}</tool_call> to call one of these:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}{{ (message.content or "").split("</think>")[-1] }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}{# <think> #}"""


def scripted_args(folder: Path, outputs: Mapping[str, str]) -> list[str]:
    """Write a model into ``folder`` that answers each of the ``outputs``' prompts by its value; return its flags."""
    config = CONFIG | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat.jinja").write_text(TEMPLATE)
    entries = [{"contains": prompt, "output": output} for prompt, output in outputs.items()]
    (folder / "script.json").write_text(json.dumps(entries))
    model = ["--model-path", str(folder), "--load-format", "script", "--dtype", "float32"]
    return [*model, "--tokenizer-path", "smollm2", "--chat-template", str(folder / "chat.jinja"), *NAME]
