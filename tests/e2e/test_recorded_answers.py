"""Answers of an instance and of a router to a fixed list of requests, compared with a recording.

After a change of answers that is wanted, ``make record-answers`` writes the recording anew. Read its diff.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from support.admin_key import ADMIN_KEY
from support.processes import Pair, pd_pair
from support.recorded_answers import FILE, answer, differences, is_same, joined
from support.recorded_requests import ADMIN, USER, WRONG, all_requests

KEYS = {USER: "the-key-of-a-user", ADMIN: ADMIN_KEY, WRONG: "the-key-of-a-stranger"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_args: list[str]) -> Iterator[Pair]:
    """A pair with keys and sessions, behind a router."""
    tmp = tmp_path_factory.mktemp("recorded")
    (tmp / "keys").write_text(f"user {KEYS[USER]}\n")
    (tmp / "admin").write_text(f"{KEYS[ADMIN]}\n")
    keys = ["--api-key-file", str(tmp / "keys"), "--admin-key-file", str(tmp / "admin")]
    sessions = ["--kv-sessions-dir", str(tmp / "sessions")]
    args = [*tiny_args, "--served-model-name", "tiny", "--max-total-tokens", "4096", *sessions, *keys]
    with pd_pair(tmp, "tcp", *args, router_args=keys) as pair:
        yield pair
        pair.assert_all_returned()


def test_answers_are_those_of_the_recording(pair: Pair, request: pytest.FixtureRequest) -> None:
    ports = {"instance": pair.decode.port, "router": pair.router.port}
    found = [answer(one, number, ports[one.front], KEYS) for number, one in enumerate(all_requests())]
    if request.config.getoption("record_answers"):
        FILE.write_text("\n".join(found) + "\n")
    recorded = FILE.read_text().splitlines()
    assert len(recorded) == len(found)
    assert not (reported := differences(recorded, found)), "\n".join(reported)


def test_only_the_last_digits_of_numbers_may_differ() -> None:
    assert is_same('{"logprob": -1.2345, "n": 3}', '{"logprob": -1.2312, "n": 3}')
    assert not is_same('{"logprob": -1.2345, "n": 3}', '{"logprob": -1.3345, "n": 3}')
    assert not is_same('{"logprob": -1.2345, "n": 3}', '{"logprob": -1.2345, "n": 4}')
    assert not is_same('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')


def test_a_stream_reads_the_same_however_its_tokens_are_divided_into_events() -> None:
    def event(text: str, ids: list[int], finish: str | None, index: int = 0, **first: list[int]) -> str:
        end = {} if finish is None else {"matched_stop": None}
        choice = {"index": index, "text": text, "finish_reason": finish, **end, "token_ids": ids, **first}
        return f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n"

    done = "data: [DONE]\n\n"
    one = event("ab", [1, 2], "stop", prompt_token_ids=[9]) + event("c", [3], "stop", 1) + done
    four = (
        event("", [1], None, prompt_token_ids=[9])
        + event("c", [3], "stop", 1)
        + ": keep-alive\n\n"
        + event("ab", [2], "stop")
        + done
    )
    assert json.dumps(joined(one, repeats=False)) == json.dumps(joined(four, repeats=False))
    assert joined(event("ab", [2, 1], "stop") + done, repeats=False) != joined(
        event("ab", [1, 2], "stop") + done, repeats=False
    )
    assert joined(event("a", [1], None) + event("ab", [1, 2], "stop") + done, repeats=True) == joined(
        event("ab", [1, 2], "stop") + done, repeats=True
    )
