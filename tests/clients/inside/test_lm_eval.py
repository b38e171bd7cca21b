"""lm-eval: its chat model, and a task scored by the logprobs of prompts, compared with the score of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

CHOICES = """\
task: pd_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
PERPLEXITY = """\
task: pd_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[answer]}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""
ANSWERS = """\
task: pd_answers
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " a banana"], 0),
    ("Water is made of hydrogen and", [" iron", " oxygen", " gold"], 1),
    ("The opposite of hot is", [" cold", " warm", " loud"], 0),
    ("Two plus two equals", [" seven", " five", " four"], 2),
    ("The sun rises in the", [" east", " kitchen", " west"], 0),
    ("A group of wolves is called a", [" pack", " school", " choir"], 0),
    ("The author of Romeo and Juliet is William", [" Shakespeare", " Tell", " Gates"], 0),
    ("Snow is", [" black", " white", " hot"], 1),
]


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    data = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question": q, "choices": c, "answer": a}) for q, c, a in QUESTIONS]
    data.write_text("\n".join(lines) + "\n")
    for name, text in (("choices", CHOICES), ("perplexity", PERPLEXITY), ("answers", ANSWERS)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("FILE", str(data)))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluated(kind: str, args: dict[str, Any], task: str, tasks: TaskManager, **more: Any) -> dict[str, Any]:
    result = lm_eval.simple_evaluate(
        model=kind, model_args=args, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0, **more
    )
    assert result is not None
    return result


@pytest.mark.parametrize("task", ["pd_choices", "pd_perplexity"])
def test_scores_are_those_of_transformers(
    url: str, model: str, model_folder: str, tasks: TaskManager, task: str
) -> None:
    served = {
        "model": model, "base_url": url + "/v1/completions", "tokenizer_backend": "huggingface",
        "tokenizer": model_folder, "num_concurrent": 4, "max_length": 2048,
    }  # fmt: skip
    ours = evaluated("local-completions", served, task, tasks)
    theirs = evaluated("hf", {"pretrained": model_folder, "dtype": "float32", "device": "cpu"}, task, tasks)
    for name, value in theirs["results"][task].items():
        if isinstance(value, float):
            assert ours["results"][task][name] == pytest.approx(value, rel=1e-3), name
    pairs = list(zip(ours["samples"][task], theirs["samples"][task], strict=True))
    assert len(pairs) == len(QUESTIONS)
    for mine, other in pairs:
        assert likelihoods(mine) == pytest.approx(likelihoods(other), abs=2e-3)


def likelihoods(sample: dict[str, Any]) -> list[float]:
    flat = [entry[0] if isinstance(entry, list | tuple) else entry for entry in sample["filtered_resps"]]
    return [float(value[0]) if isinstance(value, list | tuple) else float(value) for value in flat]


def test_its_chat_model_gets_answers(url: str, model: str, tasks: TaskManager) -> None:
    args = {"model": model, "base_url": url + "/v1/chat/completions", "num_concurrent": 2, "eos_string": "<|im_end|>"}
    result = evaluated("local-chat-completions", args, "pd_answers", tasks, apply_chat_template=True)
    samples = result["samples"]["pd_answers"]
    assert len(samples) == len(QUESTIONS)
    assert all(sample["resps"][0][0] for sample in samples)
