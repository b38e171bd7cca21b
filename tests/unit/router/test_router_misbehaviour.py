"""Instances that answer what none of ours does: the router says so, and neither fails nor hangs."""

import pytest
from support.router_rig import generate, scenario

from pdserve.router.headers import passed_on

DEEP = [[]]
for _ in range(500):
    DEEP = [DEEP]
QUESTIONS = (("POST", "/tokenize"), ("GET", "/v1/models"), ("POST", "/abort_request"), ("POST", "/flush_cache"))


@pytest.mark.parametrize("status", ["099", 204, 205, 301, 304, 600, 799])
def test_a_status_that_no_instance_has_is_a_502(status):
    @scenario()
    async def run(rig):
        w = await rig.instance("headers")
        w.answers = {path: (status, {}) for _, path in QUESTIONS}
        client = await rig.route(worker=[w])
        answer = await generate(client, status=status)
        assert (answer.status_code, answer.json()["error"]["status"]) == (502, 502)
        for method, path in QUESTIONS:
            await rig.until_states("healthy")
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["status"]) == (502, 502), path

    run()


@scenario()
async def test_what_is_nested_too_deeply_to_be_written_is_passed_on_as_text(rig):
    w = await rig.instance("error")
    w.error = {"status": 400, "message": "no", "code": "a", "more": DEEP}
    w.answers = {path: (400, {"error": w.error}) for _, path in QUESTIONS}
    client = await rig.route(worker=[w])
    answer = await generate(client)
    assert (answer.status_code, answer.json()["error"]) == (400, {"status": 400, "message": "no", "code": "a"})
    for method, path in QUESTIONS:
        answer = await client.request(method, path)
        assert (answer.status_code, answer.json()[:10]) == (400, '{"error": '), path


@scenario()
async def test_lists_that_are_none_are_empty(rig):
    w = await rig.instance()
    client = await rig.route(worker=[w])
    client.headers["authorization"] = "Bearer of-the-instances"
    odd = [{"name": "b"}, {"name": 3, "owner": None}, 7, None, [], "x"]
    for listed, names in ((odd, ["b", "3"]), (7, []), (None, [])):
        w.answers = {
            "/kv/sessions": (200, {"sessions": listed}),
            "/transfers": (200, {"open": [], "transfers": listed}),
        }
        answer = (await client.get("/kv/sessions")).json()
        assert [str(session["name"]) for session in answer["sessions"]] == names
        answer = (await client.get("/transfers")).json()
        assert (answer["open"], len(answer["transfers"])) == (0, len(names))


def test_one_header_of_each_name_is_passed_on():
    many = [(b"tracestate", b"a=%d" % i) for i in range(100)]
    assert passed_on(many) == [(b"content-type", b"application/json"), (b"tracestate", b"a=99")]
