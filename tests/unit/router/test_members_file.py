"""``--members-file``: the members follow it, and a file that is no good changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support.router_rig import Rig, generate, scenario

from pdserve.router import members_file as module
from pdserve.router.fleet import Fleet
from pdserve.router.health import HealthMonitor
from pdserve.router.instance import HealthState, Instance
from pdserve.router.members import MAX_MEMBERS, Members
from pdserve.router.members_file import MembersFile, MembersFileError, parse_members, read_members
from pdserve.router.membership import Source
from pdserve.router.options import RouterOptions
from pdserve.router.process import run_router
from pdserve.router.work import Answering
from pdserve.runtime.web.client.client import HttpClient

A, B, C = ({"url": f"http://{name}"} for name in "abc")


class Followed:
    """A file, and the members that follow it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        options = RouterOptions(worker=["http://option"])
        self.fleet = Fleet(options)
        client = HttpClient([], 1.0)
        self.members = Members(self.fleet, HealthMonitor(self.fleet, client, options), client, 60.0)
        self._file = MembersFile(str(path), self.members)

    async def after(self, *listed: Any, text: str | None = None) -> dict[str, str]:
        """Write the file, look at it, and return the members' states by the names of their hosts."""
        self.path.write_text(json.dumps(listed) if text is None else text)
        await self._file.look()
        return self.states()

    async def look(self) -> dict[str, str]:
        await self._file.look()
        return self.states()

    async def until_gone(self, instance: Instance) -> None:
        """Wait until a drain has removed an instance that has no request left."""
        while instance in self.fleet.instances:
            await asyncio.sleep(0)

    def states(self) -> dict[str, str]:
        return {i.host: i.member_state.value for i in self.fleet.instances}


def following(test: Callable[[Followed], Any]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(Followed(tmp_path / "members")))

    run.__name__ = test.__name__
    return run


@following
async def test_members_come_and_go_with_their_lines(followed: Followed) -> None:
    own = {"option": "joining"}
    assert await followed.after(A, B | {"role": "prefill", "bootstrap_port": 9}) == own | {
        "a": "joining",
        "b": "joining",
    }
    [b] = followed.members.find("http://b")
    assert (b.role, b.bootstrap_port, b.source) == ("prefill", 9, Source.FILE)
    assert await followed.after(A, C) == own | {"a": "joining", "c": "joining"}
    assert await followed.after() == own


@following
async def test_one_that_vanishes_is_drained_and_comes_back_if_it_is_listed_again(followed: Followed) -> None:
    await followed.after(A)
    [a] = followed.members.find("http://a")
    followed.fleet.set_state(a, HealthState.HEALTHY, "test")
    with Answering(a):
        assert (await followed.after())["a"] == "draining"
        assert (await followed.after(A))["a"] == "ready"
    assert followed.members.find("http://a") == [a]


@following
async def test_members_from_elsewhere_and_orders_of_admins_are_not_touched(followed: Followed) -> None:
    followed.members.add("http://api", None, None, Source.API)
    states = await followed.after(A, {"url": "http://option"}, {"url": "http://api"})
    assert states == {"option": "joining", "api": "joining", "a": "joining"}
    followed.members.cordon(followed.members.find("http://a")[0])
    assert (await followed.after(A, B))["a"] == "cordoned"
    followed.members.remove(followed.members.find("http://b")[0])
    assert await followed.after(A, B) == {"option": "joining", "api": "joining", "a": "cordoned"}
    assert await followed.after() == {"option": "joining", "api": "joining"}


@following
async def test_an_admins_drain_survives_other_changes_of_the_file(followed: Followed) -> None:
    await followed.after(A)
    [a] = followed.members.find("http://a")
    with Answering(a):
        followed.members.drain(a)
        assert (await followed.after(A, B))["a"] == "draining"
        # Its entry is new again, so it is added as soon as the drain has ended.
        await followed.after(B)
        assert (await followed.after(A, B))["a"] == "draining"
    await followed.until_gone(a)
    assert "a" in await followed.look()
    assert followed.members.find("http://a") != [a]


@following
async def test_an_instance_that_an_admin_removed_waits_for_its_own_entry(followed: Followed) -> None:
    await followed.after(A)
    followed.members.drain(followed.members.find("http://a")[0])
    assert "a" not in await followed.after(A, B)
    assert "a" not in await followed.after(B)
    assert "a" in await followed.after(A, B)


@following
async def test_an_admin_can_make_the_drain_of_the_file_their_own(followed: Followed) -> None:
    await followed.after(A)
    [a] = followed.members.find("http://a")
    with Answering(a):
        await followed.after()
        followed.members.drain(a)
        assert (await followed.after(A))["a"] == "draining"


@following
async def test_an_admins_order_for_a_vanished_instance_stays(followed: Followed) -> None:
    await followed.after(A, B)
    for url, order in (("http://a", followed.members.cordon), ("http://b", followed.members.readmit)):
        [instance] = followed.members.find(url)
        with Answering(instance):
            await followed.after(*(entry for entry in (A, B) if entry["url"] != url))
            assert followed.states()[instance.host] == "draining"
            order(instance)
    await followed.after(A, B)
    assert await followed.after(A, B, C) == {"option": "joining", "a": "cordoned", "b": "joining", "c": "joining"}
    with Answering(a := followed.members.find("http://a")[0]), Answering(b := followed.members.find("http://b")[0]):
        await followed.after()
        followed.members.cordon(a)
        followed.members.readmit(b)
    states = {"option": "joining", "a": "cordoned", "b": "joining"}
    assert await followed.after(C) == states | {"c": "joining"}
    assert await followed.after() == states


@following
async def test_a_cordoned_instance_that_vanishes_and_comes_back_is_cordoned(followed: Followed) -> None:
    await followed.after(A)
    [a] = followed.members.find("http://a")
    followed.members.cordon(a)
    with Answering(a):
        assert (await followed.after())["a"] == "draining"
        assert (await followed.after(A))["a"] == "cordoned"


@following
async def test_an_entry_of_a_member_that_drains_takes_effect_later(followed: Followed) -> None:
    api = followed.members.add("http://a", None, None, Source.API)
    with Answering(api):
        followed.members.drain(api)
        assert await followed.after(A, B) == {"option": "joining", "a": "draining", "b": "joining"}
    await followed.until_gone(api)
    assert await followed.look() == {"option": "joining", "a": "joining", "b": "joining"}
    assert followed.members.find("http://a")[0].source is Source.FILE


def test_entries_above_the_limit_of_members_are_added_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.members.MAX_MEMBERS", 2)

    @following
    async def test(followed: Followed) -> None:
        assert set(await followed.after(A)) == {"option", "a"}
        [a] = followed.members.find("http://a")
        with Answering(a):
            for _ in range(3):
                assert set(await followed.after(B, C)) == {"option", "a"}
            [record] = [record for record in caplog.records if record.name == module.__name__]
            assert "2 instances wait to be added; http://b: this router has 2 instances" in record.getMessage()
        await followed.until_gone(a)
        assert set(await followed.look()) == {"option", "b"}

    test(tmp_path)


def test_an_empty_list_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @following
    async def test(followed: Followed) -> None:
        await followed.after(A)
        caplog.clear()
        for _ in range(2):
            assert await followed.after() == {"option": "joining"}
        [record] = [record for record in caplog.records if record.name == module.__name__]
        assert "is an empty list now: all its instances are drained" in record.getMessage()

    test(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write a list like"),
        ('[{"url": "http://a"}', "write a list like"),
        ('{"url": "http://a"}', "write a list like"),
        ("\udcff", "write a list like"),
        ("[" * 5000, "write a list like"),
        ('[{"url": "a"}]', "url: 'a' is not an instance's URL"),
        ('[{"url": "http://a", "role": "king"}]', "role: is none of"),
        ('[{"url": "http://a", "rank": 1}]', "unknown field `rank`"),
        ('[{"url": "http://a"}, {"url": "http://a/"}]', "lists an instance twice"),
        (" " * (1 << 20) + "[]", "has more than 1048576 bytes"),
        (json.dumps([{"url": f"http://h{n}"} for n in range(MAX_MEMBERS + 1)]), "lists 1025 instances; a router takes"),
        (None, "can't be read: No such file"),
    ],
)
def test_a_file_that_is_no_good_changes_nothing_and_is_logged_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    says: str,
) -> None:
    async def run() -> None:
        followed = Followed(tmp_path / "members")
        before = await followed.after(A, B)
        caplog.clear()
        for _ in range(2):
            if text is None:
                followed.path.unlink(missing_ok=True)
            else:
                followed.path.write_bytes(text.encode(errors="surrogateescape"))
            for _ in range(2):
                await followed.look()
            [record] = [record for record in caplog.records if record.name == module.__name__]
            assert says in record.getMessage()
            assert followed.states() == before
            # It is told again after the file was in order.
            await followed.after(A, B)
            caplog.clear()

    asyncio.run(run())
    path = tmp_path / "bad"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(MembersFileError):
        parse_members(str(path), read_members(str(path)))
    monkeypatch.setattr("pdserve.router.process.harden", lambda **_: None)  # it is for a process of its own
    assert run_router(RouterOptions(members_file=str(path))) == 2
    assert says in capsys.readouterr().err


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "members"
    path.write_text("[]")
    monkeypatch.setattr("pdserve.runtime.trusted_path.foreign", lambda state: "it belongs to user 7")
    with pytest.raises(MembersFileError, match="it belongs to user 7"):
        read_members(str(path))


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "members"
    path.write_text("[]")
    path.chmod(0o644)
    assert read_members(str(path)) == b"[]"
    path.chmod(mode)
    with pytest.raises(MembersFileError, match="others than its owner may write there"):
        read_members(str(path))


def test_a_pipe_or_device_is_refused_and_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    read, write = os.pipe()
    os.write(write, b"[]")
    for path in (str(tmp_path / "pipe"), "/dev/zero", f"/dev/fd/{read}"):
        with pytest.raises(MembersFileError, match=f"{path} can't be read: it is not a regular file"):
            read_members(path)
    with pytest.raises(MembersFileError, match="Is a directory"):
        read_members(str(tmp_path / "folder"))
    assert os.read(read, 9) == b"[]"
    os.close(read)
    os.close(write)


def test_a_read_that_hangs_is_reported_and_does_not_keep_the_router_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is a mount that does not answer."""
    go_on = threading.Event()
    readers: list[threading.Thread] = []

    def read(path: str) -> bytes:
        readers.append(threading.current_thread())
        go_on.wait()
        return b"[]"

    monkeypatch.setattr(module, "SLOW_SECONDS", 0.001)
    monkeypatch.setattr(module, "read_members", read)

    async def main() -> None:
        file = MembersFile("members", cast(Members, None))
        following = asyncio.create_task(file.run())
        while not any("takes more than 0.001 s" in message for message in caplog.messages):
            await asyncio.sleep(0)
        following.cancel()
        if not readers[0].daemon:
            go_on.set()  # or the interpreter, and maybe the loop, would wait for it without end

    asyncio.run(main())
    assert not go_on.is_set()
    go_on.set()


def test_a_router_serves_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    path = tmp_path / "members"

    def write(*instances: Any) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps([{"url": instance.url} for instance in instances]))
        new.replace(path)

    @scenario(members_file=str(path))
    async def run(rig: Rig) -> None:
        first, second = await rig.instance(), await rig.instance()
        write(first)
        client = await rig.route(states=["healthy"])
        assert (await generate(client)).status_code == 200
        write(second)
        await rig.until_states("healthy")
        while (info := (await client.get("/server_info")).json()["instances"]) and info[0]["url"] != second.url:
            await asyncio.sleep(0)
        await rig.until_states("healthy")
        assert (await generate(client)).status_code == 200
        assert (len(first.requests), len(second.requests)) == (1, 1)

    RouterOptions(members_file=str(path)).check()
    cast(Callable[[], None], run)()
