"""Sessions over the router: it finds the instance of a request or a session, and reports what it can't do."""

from support.router_rig import scenario

NO = (404, {"error": {"message": "no session"}})
LEG = (409, {"error": {"message": "is computed for another instance"}})


def paths(instance):
    return [path for _, path, _ in instance.questions]


@scenario()
async def test_a_request_is_snapshotted_where_it_is_answered(rig):
    p, d, w = await rig.instance(), await rig.instance(), await rig.instance()
    client = await rig.route([p], [d], worker=[w])
    p.answers["/kv/snapshot"], w.answers["/kv/snapshot"] = LEG, NO
    d.answers["/kv/snapshot"] = (200, {"name": "s", "kv": "stored"})
    said = await client.post("/kv/snapshot", json={"name": "s", "rid": "r"})
    assert (said.status_code, said.json()["kv"]) == (200, "stored")
    assert "/kv/snapshot" not in paths(p)  # a leg's is not asked for once the answer's is found
    d.answers["/kv/snapshot"] = NO
    said = await client.post("/kv/snapshot", json={"name": "s", "rid": "r"})
    assert (said.status_code, "another instance" in said.text) == (409, True)
    w.answers["/kv/snapshot"] = (400, {"error": {"message": "name: is bad"}})
    asked = len(d.questions)
    assert (await client.post("/kv/snapshot", json={"name": "/"})).status_code == 400
    assert len(d.questions) == asked


@scenario()
async def test_a_session_is_restored_where_it_is_and_not_as_a_stream(rig):
    first, second = await rig.instance(), await rig.instance()
    client = await rig.route(worker=[first, second])
    first.answers["/kv/restore"], second.answers["/kv/restore"] = (501, {}), (200, {"text": "ab"})
    assert (await client.post("/kv/restore", json={"name": "s"})).json() == {"text": "ab"}
    refused = await client.post("/kv/restore", json={"name": "s", "stream": True})
    assert (refused.status_code, "ask an instance itself" in refused.text) == (400, True)
    assert (await client.post("/kv/restore", content=b"{")).status_code == 400
    second.answers["/kv/restore"] = NO
    assert (await client.post("/kv/restore", json={"name": "s"})).status_code == 404
    await first.kill()
    await second.kill()
    assert (await client.post("/kv/restore", json={"name": "s"})).status_code == 503


@scenario()
async def test_lists_are_one_list_and_a_session_is_deleted_wherever_it_is(rig):
    first, second = await rig.instance(), await rig.instance()
    client = await rig.route(worker=[first, second])
    shared, own = {"name": "b", "owner": "x", "bytes": 1}, {"name": "a", "owner": "x", "bytes": 2}
    first.answers["/kv/sessions"] = (200, {"sessions": [shared]})
    second.answers["/kv/sessions"] = (200, {"sessions": [own, shared]})
    listed = (await client.get("/kv/sessions")).json()["sessions"]
    assert listed == [own | {"instances": [second.url]}, shared | {"instances": [first.url, second.url]}]
    first.answers["/kv/sessions/a?owner=x"] = NO
    second.answers["/kv/sessions/a?owner=x"] = (200, {"deleted": "a"})
    assert (await client.delete("/kv/sessions/a?owner=x")).json() == {"deleted": "a"}
    second.answers["/kv/sessions/a?owner=x"] = NO
    assert (await client.delete("/kv/sessions/a?owner=x")).status_code == 404


@scenario()
async def test_sessions_of_one_name_are_one_for_each_owner(rig):
    first, second = await rig.instance(), await rig.instance()
    client = await rig.route(worker=[first, second])
    of_x, of_y, of_nobody = {"name": "a", "owner": "x"}, {"name": "a", "owner": "y"}, {"name": "a"}
    first.answers["/kv/sessions"] = (200, {"sessions": [of_y, of_x]})
    second.answers["/kv/sessions"] = (200, {"sessions": [of_x, of_nobody]})
    assert (await client.get("/kv/sessions")).json()["sessions"] == [
        of_nobody | {"instances": [second.url]},
        of_x | {"instances": [first.url, second.url]},
        of_y | {"instances": [first.url]},
    ]


@scenario()
async def test_the_words_of_llama_server(rig):
    w, other = await rig.instance(), await rig.instance()
    client = await rig.route(worker=[w, other])
    for action in ("save", "restore", "erase"):
        w.answers[f"/slots/0?action={action}"] = (200, {"id_slot": 0})
        said = await client.post(f"/slots/0?action={action}", json={"filename": "f"})
        assert said.json() == {"id_slot": 0}
    assert [path for path in paths(other) if "slots" in path] == ["/slots/0?action=erase"]  # wherever it is
    asked = len(w.questions)
    for query in ("", "?action=steal", "?action=save&x=1", "?action=save%20HTTP"):
        assert (await client.post(f"/slots/0{query}", json={"filename": "f"})).status_code == 400
    assert len(w.questions) == asked
