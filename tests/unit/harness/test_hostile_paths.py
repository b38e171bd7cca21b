"""The hostile client attacks every path that a user key may use, the ones of the next API too."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import httpx
import pytest
from hostile.bombs import SCHEMA_FIELDS, bomb
from hostile.client import HostileUser
from hostile.distortions import Distortions, at, places, with_value
from hostile.kept_responses import KeptResponseAttacks
from hostile.sender import OTHER, Sender, label_of, refused_field
from hostile.sound import (
    BODIES,
    FORBIDDEN,
    FORBIDDEN_PATHS,
    LIMITS,
    PARAMETERS,
    STREAMED,
    USER_PATHS,
    Known,
    SoundRequest,
    is_known,
    sound_request,
)
from hostile.watch import Record

from pdserve.runtime.web.apis import PATHS
from pdserve.runtime.web.paths import PathFacts

LABELS = {facts.label for facts in PATHS}
FOREIGN = "resp_foreign-2"


def test_every_path_of_a_user_has_a_sound_request() -> None:
    assert [facts.label for facts in USER_PATHS if not is_known(facts)] == [], "add them to tests/hostile/sound.py"


def test_every_path_that_refuses_users_is_tried() -> None:
    assert {facts.label for facts in FORBIDDEN_PATHS} == FORBIDDEN.keys(), "add them to tests/hostile/sound.py"


def test_no_request_is_for_a_path_that_is_gone() -> None:
    assert {*BODIES, *PARAMETERS, *FORBIDDEN, *LIMITS, *SCHEMA_FIELDS} <= LABELS


def test_every_generating_path_streams_and_has_a_limit() -> None:
    assert LIMITS.keys() == STREAMED


@pytest.mark.parametrize("facts", USER_PATHS, ids=lambda facts: facts.label)
def test_a_sound_request_is_for_its_path(facts: PathFacts) -> None:
    for seed in range(20):
        request = sound_request(facts, random.Random(seed), Known())
        assert label_of(request.method, request.path) == f"{request.method} {facts.label}"


def test_a_limit_of_tokens_replaces_the_one_in_the_body() -> None:
    request = SoundRequest("POST", "/api/chat", "/api/chat", {"options": {"num_predict": 1, "seed": 1}})
    assert request.limited(7).body == {"options": {"num_predict": 7, "seed": 1}}
    assert request.body == {"options": {"num_predict": 1, "seed": 1}}


@dataclass
class Responses:
    """Stands in for the neighbour's kept responses."""

    ids: list[tuple[str, str]] = field(
        default_factory=lambda: [("http://router", FOREIGN), ("http://decode", "resp_3")]
    )


@dataclass
class Neighbour:
    """Stands in for the neighbour."""

    canary: str = "canary"
    questions: list[object] = field(default_factory=list)
    responses: Responses = field(default_factory=Responses)


@dataclass
class Cluster:
    """Stands in for a cluster: servers that answer every request with one status."""

    status: int = 200
    keys: dict[str, str] = field(default_factory=lambda: {"mallory": "m-key"})
    urls: dict[str, str] = field(default_factory=lambda: {"router": "http://router", "decode": "http://decode"})

    @property
    def instances(self) -> dict[str, str]:
        return {"decode": "http://decode"}

    def client(self, name: str) -> httpx.Client:
        def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(self.status, content=iter([b'{"id":"resp_own","paths":{}}']))

        return httpx.Client(transport=httpx.MockTransport(answer))


def test_an_attacker_takes_every_path_before_one_comes_again() -> None:
    record, known = Record(), Known()
    user = HostileUser(Cluster(), Neighbour(), record, 1, [], known)  # type: ignore[arg-type]
    for _ in range(3 * len(USER_PATHS)):
        user.nearly_sound()
    assert {path.partition(" ")[2] for path in record.paths} >= {facts.label for facts in USER_PATHS}
    assert "POST /v1/responses " in record.path_table()
    assert known.responses
    user.close()
    assert not known.responses


@pytest.mark.parametrize("status", [200, 404])
def test_another_keys_response_must_not_be_served(status: int) -> None:
    record, rng = Record(), random.Random(4)
    sender = Sender(Cluster(status), record, rng)  # type: ignore[arg-type]
    attacks = KeptResponseAttacks(sender, Neighbour(), record, Known(), rng)  # type: ignore[arg-type]
    for _ in range(20):
        attacks.foreign_id()
    assert bool(record.violations) == (status == 200)


BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stop": ["a"]}


def test_distortions_are_seeded_and_differ_from_the_body() -> None:
    drawn = [[Distortions(random.Random(seed)).distorted(BODY) for seed in range(60)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 30
    assert all(data != json.dumps(BODY).encode() for data in drawn[0])


def test_places_are_found_and_replaced() -> None:
    assert ("messages", 0, "role") in places(BODY)
    changed = with_value(BODY, ("messages", 0, "role"), "z")
    assert at(changed, ("messages", 0, "role")) == "z"
    assert at(BODY, ("messages", 0, "role")) == "user"


def test_bombs_are_json_of_a_bounded_length_for_paths_that_exist() -> None:
    for seed in range(60):
        path, body = bomb(random.Random(seed))
        assert path in LABELS
        assert len(json.dumps(body)) < 32 << 20


def test_paths_and_refused_fields_are_told_apart() -> None:
    assert label_of("HEAD", "/livez") == "GET /livez"
    assert label_of("PUT", "/livez") == label_of("GET", "/nowhere") == OTHER
    assert refused_field(b'{"error": {"param": "input[17].id"}}') == "input[N].id"
    assert refused_field(b'{"error": {"param": null}}') == ""
