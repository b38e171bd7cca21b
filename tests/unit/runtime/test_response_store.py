"""Responses that are kept: their limits, their files, and what a request says about them."""

from __future__ import annotations

import json
import threading
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from pdserve.runtime.web.responses import request as request_module
from pdserve.runtime.web.responses import response_store
from pdserve.runtime.web.responses.request import InputTooLong, NotKept, ResponseRequest, read_request
from pdserve.runtime.web.responses.response_files import ResponseFiles, ResponseFolderError
from pdserve.runtime.web.responses.response_store import (
    OVERHEAD_BYTES,
    KeptResponse,
    NoFiles,
    ResponseStore,
    StoreLimits,
)

EACH = OVERHEAD_BYTES + 100
ITEM = {"type": "message", "role": "user", "content": "a"}
OUTPUT = [{"id": "rs_x_0", "type": "reasoning"}, {"id": "msg_x_1", "type": "message"}]


def kept(owner: str, name: str, nbytes: int = EACH) -> KeptResponse:
    return KeptResponse(owner, name, b"{}", b"x" * (nbytes - OVERHEAD_BYTES - 2))


def names(store: ResponseStore, owner: str) -> list[str]:
    return [str(i) for i in range(20) if store.get(owner, str(i)) is not None]


def test_the_oldest_of_an_owner_make_room_within_its_quota() -> None:
    store = ResponseStore(StoreLimits(100 * EACH, 3 * EACH), NoFiles())
    for i in range(5):
        assert store.put(kept("ana", str(i)))
    store.put(kept("bo", "0"))
    assert (names(store, "ana"), names(store, "bo")) == (["2", "3", "4"], ["0"])
    store.put(kept("ana", "2"))  # again: it is the newest now
    store.put(kept("ana", "5"))
    assert names(store, "ana") == ["2", "4", "5"]
    assert not store.put(kept("ana", "6", 3 * EACH + 1))
    assert names(store, "ana") == ["2", "4", "5"]
    assert (store.count, store.nbytes) == (4, 4 * EACH)


def test_the_owner_with_the_most_makes_room_for_others() -> None:
    store = ResponseStore(StoreLimits(4 * EACH, 4 * EACH), NoFiles())
    for i in range(4):
        store.put(kept("ana", str(i)))
    store.put(kept("bo", "0"))
    store.put(kept("bo", "1"))
    assert (names(store, "ana"), names(store, "bo")) == (["2", "3"], ["0", "1"])


def test_numbers_are_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_PER_OWNER", 2)
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    store = ResponseStore(StoreLimits(100 * EACH, 100 * EACH), NoFiles())
    for i in range(3):
        store.put(kept("ana", str(i)))
        store.put(kept("bo", str(i)))
    assert store.count == 3
    assert len(names(store, "ana")) + len(names(store, "bo")) == 3


def test_an_owner_sees_only_its_own() -> None:
    store = ResponseStore(StoreLimits(9 * EACH, 9 * EACH), NoFiles())
    store.put(kept("ana", "1"))
    assert store.get("bo", "1") is None
    assert not store.delete("bo", "1")
    assert store.delete("ana", "1")
    assert (store.count, store.nbytes) == (0, 0)


def test_files_survive_and_go_with_their_responses(tmp_path: Path) -> None:
    limits = StoreLimits(9 * EACH, 3 * EACH)
    store = ResponseStore(limits, ResponseFiles(tmp_path / "kept"))
    for i in range(4):
        store.put(kept("ana", str(i)))
    store.put(KeptResponse("bo", "é/..", b'{"a":1}', b"{}"))
    store.delete("ana", "2")
    store.close()
    again = ResponseStore(limits, ResponseFiles(tmp_path / "kept"))
    assert names(again, "ana") == ["1", "3"]
    assert again.get("bo", "é/..") == KeptResponse("bo", "é/..", b'{"a":1}', b"{}")
    again.close()
    assert len(list((tmp_path / "kept").glob("*.response"))) == 3
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kept").iterdir()} == {0o600}


def test_a_damaged_file_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(StoreLimits(9 * EACH, 9 * EACH), ResponseFiles(tmp_path))
    store.put(kept("ana", "1"))
    store.put(kept("ana", "2"))
    store.close()
    first, second = sorted(tmp_path.glob("*.response"))
    second.write_bytes(first.read_bytes())  # another one's content
    (tmp_path / "x.response").write_bytes(b"no msgpack")
    again = ResponseStore(StoreLimits(9 * EACH, 9 * EACH), ResponseFiles(tmp_path))
    again.close()
    assert again.count == 1
    assert caplog.text.count("is left alone") == 2
    assert second.exists()


def test_a_response_beyond_a_smaller_quota_drops_no_other(tmp_path: Path) -> None:
    store = ResponseStore(StoreLimits(9 * EACH, 9 * EACH), ResponseFiles(tmp_path))
    store.put(kept("ana", "1"))
    store.put(kept("ana", "2", 2 * EACH + 1))
    store.close()
    again = ResponseStore(StoreLimits(9 * EACH, 2 * EACH), ResponseFiles(tmp_path))
    again.close()
    assert names(again, "ana") == ["1"]
    assert len(list(tmp_path.glob("*.response"))) == 1


def test_a_slow_disk_holds_up_no_response_that_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    encode = msgspec.msgpack.encode
    monkeypatch.setattr(msgspec.msgpack, "encode", lambda kept: written.append(kept.id) or encode(kept))
    goes_on = threading.Event()
    files = ResponseFiles(tmp_path)
    files._submit(goes_on.wait)  # type: ignore[arg-type]
    for name in ("1", "2", "1"):
        files.write(kept("ana", name))
    files.remove(kept("ana", "2"))
    goes_on.set()
    files.close()
    assert written == ["1"]
    assert len(list(tmp_path.glob("*.response"))) == 1


def test_one_server_uses_a_folder_at_a_time(tmp_path: Path) -> None:
    files = ResponseFiles(tmp_path)
    with pytest.raises(ResponseFolderError, match="another server uses this folder"):
        ResponseFiles(tmp_path)
    files.close()
    ResponseFiles(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ResponseFolderError, match="--responses-dir"):
        ResponseFiles(tmp_path / "file")


def read(body: object, *, keeps: bool = True, is_first: bool = False, limit: int = 1 << 20) -> ResponseRequest:
    response = json.dumps({"id": "resp_x", "output": OUTPUT}).encode()
    known = {"resp_x": KeptResponse("", "resp_x", response, json.dumps(ITEM).encode())}
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(raw, known.get, limit, keeps=keeps, is_first=is_first)


def items(request: ResponseRequest) -> list[object]:
    found: list[object] = json.loads(b"[" + request.items + b"]")
    return found


def test_the_conversation_so_far_comes_before_the_input() -> None:
    for given, new in (("b", [ITEM | {"content": "b"}]), ([{"role": "user", "content": "c"}], None), (None, [])):
        request = read({"input": given, "previous_response_id": "resp_x", "temperature": 0})
        wanted = [ITEM, *OUTPUT, *(given if new is None else new)]
        content = json.loads(request.body)
        assert (content["input"], content["kept_elsewhere"], content["temperature"]) == (wanted, True, 0)
        assert (items(request), request.keeps) == (wanted, True)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"7", b"", b'{"input": {}}', b'{"previous_response_id": 7}', b"\xff", b"[" * 100_000]
)
@pytest.mark.parametrize("is_first", [False, True])
def test_what_is_not_valid_is_left_to_the_reader_of_the_api(body: bytes, is_first: bool) -> None:
    assert read(body, is_first=is_first) == (body, False, b"")


@pytest.mark.parametrize("value", [b'"\xff"', b'"\xed\xa0\x80"', b"7"])
def test_an_item_that_is_not_valid_is_left_to_the_reader_of_the_api(value: bytes) -> None:
    item = b'{"type":"item_reference","id":' + value + b"}"
    assert read(b'{"input":[' + item + b"]}").body.count(item) == 2


def test_a_router_tells_instances_to_keep_nothing() -> None:
    for body in ({"input": "a"}, {}, {"input": "a", "kept_elsewhere": False}):
        request = read(body, is_first=True)
        assert json.loads(request.body) == {**body, "kept_elsewhere": True}
        assert read(json.loads(request.body)).keeps is False
    for store in (True, None):
        assert read({"store": store, "input": "a"}, is_first=True).keeps
    request = read({"store": False, "input": "a"}, is_first=True)
    assert (json.loads(request.body), request.keeps) == ({"store": False, "input": "a"}, False)


def test_an_instance_keeps_nothing_for_a_router_that_keeps_nothing() -> None:
    body = {"input": "a", "previous_response_id": "resp_x", "bootstrap_room": 7}
    assert read(body) == (json.dumps(body).encode(), False, b"")


def test_references_become_the_items() -> None:
    reference = {"type": "item_reference", "id": "msg_x_1"}
    request = read({"input": [ITEM, reference, {"role": "user", "content": '"item_reference"'}]})
    assert json.loads(request.body)["input"][:2] == [ITEM, OUTPUT[1]]
    assert read({"input": [reference], "store": False}).keeps is False
    for unknown in ("msg_x_2", "msg_y_1", "nonsense", ""):
        with pytest.raises(NotKept) as error:
            read({"input": [ITEM, {**reference, "id": unknown}]})
        assert error.value.param == "input[1].id"


def test_a_response_that_is_named_often_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    output_of = response_store.output_of
    monkeypatch.setattr(request_module, "output_of", lambda response: parsed.append(response) or output_of(response))
    reference = {"type": "item_reference", "id": "msg_x_1"}
    assert items(read({"input": [reference] * 50, "previous_response_id": "resp_x"}))[3:] == [OUTPUT[1]] * 50
    assert len(parsed) == 1


@pytest.mark.parametrize("is_first", [False, True])
def test_an_input_that_becomes_too_long_is_refused(is_first: bool) -> None:
    by_reference = {"input": [{"type": "item_reference", "id": "msg_x_1"}] * 20}
    for body, param in ((by_reference, "input"), ({"input": "a", "previous_response_id": "resp_x"}, "input")):
        length = len(read(body).body)
        assert read(body, is_first=is_first, limit=length + 100).keeps
        with pytest.raises(InputTooLong) as error:
            read(body, is_first=is_first, limit=length - 40)
        assert (error.value.status, error.value.param) == (413, param)
    # What names nothing has been measured before.
    assert read({"input": "a" * 100}, limit=100).keeps


@pytest.mark.parametrize("last", [b"8", b'"item_reference"'])
def test_no_objects_are_built_of_an_inputs_values(last: bytes) -> None:
    """Each would take a hundred bytes, and a request with a million numbers is held until an instance refuses it."""
    body = b'{"input":[' + b"7," * 100_000 + last + b"]}"
    read(b"{}")
    tracemalloc.start()
    try:
        read(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * len(body)


def test_inputs_of_running_requests_have_limits() -> None:
    store = ResponseStore(StoreLimits(3 * EACH, 2 * EACH), NoFiles())
    assert not store.has_room("ana", 2 * EACH)
    with store.hold("ana", EACH), store.hold("ana", 100):
        assert not store.has_room("ana", EACH)
        assert store.has_room("bo", EACH)
        with store.hold("bo", EACH):
            assert not store.has_room("bo", 100)
            assert not store.has_room("cy", EACH)
    assert store.has_room("ana", EACH)


def test_a_failure_on_the_thread_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ResponseFiles(tmp_path)

    def fail(path: Path, target: Path) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(Path, "replace", fail)
    files.write(kept("ana", "1"))
    files.close()
    assert "no such thing" in caplog.text
    caplog.clear()
    files.write(kept("ana", "2"))
    files.remove(kept("ana", "1"))
    assert caplog.text.count("not up to date") == 2


def test_a_response_that_is_not_kept_is_refused_by_name() -> None:
    for keeps, reason in ((True, "another server keeps it"), (False, "--responses-size 0")):
        with pytest.raises(NotKept, match=reason) as error:
            read({"input": "a", "previous_response_id": "resp_y"}, keeps=keeps)
        assert error.value.param == "previous_response_id"
    assert not read({"input": "a"}, keeps=False).keeps
