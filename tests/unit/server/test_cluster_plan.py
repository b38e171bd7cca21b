"""What ``pdserve up`` starts, and with which flags."""

from dataclasses import Field, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from pdserve.router.options import RouterOptions, RouterTargets
from pdserve.runtime.cluster_secret import ClusterSecret, inherited_descriptors
from pdserve.runtime.machine.topology import Machine
from pdserve.server import cluster
from pdserve.server.child_server import ChildServer
from pdserve.server.cli import app
from pdserve.server.cluster_options import ClusterOptions, ClusterOptionsError
from pdserve.server.cluster_plan import plan_cluster
from pdserve.server.core_split import split_cores, split_nodes
from pdserve.server.options import ServerOptions


def understood(process):
    """Return the options that a planned process makes of what it reads."""
    return msgspec.json.decode(msgspec.json.encode(process.command), type=ChildServer).typed_options()


def machine(cores, *, smt=1, nodes=1, quota=None):
    """Make a machine of cores 0, 1, …, in ``nodes`` equal parts.

    ``smt``: threads on each physical core, numbered as neighbours.
    """
    allowed = frozenset(range(cores))
    siblings = {cpu: frozenset(range(cpu - cpu % smt, cpu - cpu % smt + smt)) for cpu in allowed}
    part = cores // nodes
    return Machine(
        allowed, siblings, frozenset(), {n: frozenset(range(n * part, (n + 1) * part)) for n in range(nodes)}, quota
    )


def shares(options, machine):
    plan = plan_cluster(options, machine)
    return [(options.cpus, options.threads) for options in map(understood, plan.instances)], plan.cores


def test_physical_cores_are_divided():
    assert shares(ClusterOptions(), machine(8, smt=2)) == (
        [("0,2", None), ("4,6", None)],
        "prefill-0 0,2; decode-0 4,6: 8 allowed, 4 are SMT siblings",
    )


def test_an_instance_stays_on_one_node():
    assert shares(ClusterOptions(prefill=2), machine(8, nodes=2))[0] == [("4-7", None), ("0,1", None), ("2,3", None)]
    assert shares(ClusterOptions(cpus="0-1,4-5"), machine(8, nodes=2))[0] == [("0,1", None), ("4,5", None)]


@pytest.mark.parametrize(("quota", "threads"), [(0.5, [1, 1]), (2.0, [1, 1]), (5.9, [3, 2])])
def test_a_quota_is_divided_and_binds_no_thread(quota, threads):
    divided, why = shares(ClusterOptions(), machine(8, quota=quota))
    assert divided == [(None, count) for count in threads]
    assert f"a CPU quota of {quota:g} cores divided" in why
    assert f"decode-0 any ({threads[1]} thread{'s' * (threads[1] > 1)}): 8 allowed" in why


def test_a_quota_divides_named_cores_no_further():
    assert shares(ClusterOptions(cpus="2-7"), machine(8, quota=3.0))[0] == [("2-4", 2), ("5-7", 1)]
    assert shares(ClusterOptions(), machine(2, quota=2.0))[0] == [("0", None), ("1", None)]


def test_ranks_of_an_instance_share_its_cores():
    assert shares(ClusterOptions(tp_size=2), machine(8))[0] == [("0-3", None), ("4-7", None)]
    assert shares(ClusterOptions(tp_size=2), machine(2))[0] == [(None, None), (None, None)]
    assert shares(ClusterOptions(tp_size=2), machine(8, quota=6.0))[0] == [(None, 2), (None, 2)]
    assert shares(ClusterOptions(tp_size=2, threads=2), machine(8))[0] == [("0-3", 2), ("4-7", 2)]


def test_nodes_without_a_guest_are_left_out():
    assert split_nodes([[0, 1], [2, 3, 4]], 1) == [[2, 3, 4]]
    assert split_nodes([[0], [1]], 3) == [[0], [0], [1]]


@pytest.mark.parametrize(
    ("cores", "instances", "split"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1, 2], [3, 4]]),
        ([2, 5, 7, 9], 3, [[2, 5], [7], [9]]),
        ([0, 1], 3, [[0], [1], [0]]),
        ([4], 2, [[4], [4]]),
    ],
)
def test_cores_are_shared_only_when_there_are_too_few(cores, instances, split):
    assert split_cores(cores, instances) == split


def test_every_process_gets_what_the_cluster_was_asked_for():
    options = ClusterOptions(prefill=2, unified=1, port=8123, api_key="key", page_size=8, drain_timeout=3.0)
    plan = plan_cluster(options, machine(4))
    assert [p.name for p in plan.processes] == ["prefill-0", "prefill-1", "decode-0", "unified-0", "router"]
    instances = [understood(p) for p in plan.instances]
    assert [i.disaggregation_mode for i in instances] == ["prefill", "prefill", "decode", "unified"]
    assert [i.cpus for i in instances] == ["0", "1", "2", "3"]
    assert {(i.mem_fraction_static, i.mem_instances) for i in instances} == {(None, 4)}
    assert {(i.api_key, i.page_size, i.disaggregation_transfer_backend) for i in instances} == {("key", 8, "shm")}
    ports = [port for i in instances for port in (i.port, i.disaggregation_bootstrap_port)]
    assert len(set(ports)) == 8
    router = understood(plan.router)
    assert router == RouterOptions(
        prefill=[
            word
            for p, i in zip(plan.instances[:2], instances, strict=False)
            for word in (p.url, str(i.disaggregation_bootstrap_port))
        ],
        decode=[plan.instances[2].url],
        worker=[plan.instances[3].url],
        port=8123,
        api_key="key",
        drain_timeout=3.0,
    )


ROUTER_OPTIONS = [item for item in fields(RouterOptions) if item.name not in {t.name for t in fields(RouterTargets)}]


def other_value(item: Field) -> object:
    """Return a value of an option that is not its default."""
    hint = get_type_hints(RouterOptions)[item.name]
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != item.default)
    if isinstance(item.default, bool):
        return not item.default
    return item.default + 1 if isinstance(item.default, int | float) else "given"


@pytest.mark.parametrize("bit", range(len(ROUTER_OPTIONS).bit_length()))
def test_router_takes_each_of_its_options_from_the_cluster(bit):
    """A run gives all options with this bit in their number. For any two options, some run gives only one of them."""
    given = {item.name: other_value(item) for number, item in enumerate(ROUTER_OPTIONS, 1) if number >> bit & 1}
    flags = {name: "--" + name.replace("_", "-") for name in given}
    words = [flags[name] if value is True else f"{flags[name]}={value}" for name, value in given.items()]
    _, bound, _ = app.parse_args(["up", *words])
    names = [item.name for item in ROUTER_OPTIONS]
    expected = {name: getattr(ClusterOptions(), name) for name in names} | given
    assert {name: getattr(bound.arguments["options"], name) for name in names} == expected
    plan = plan_cluster(bound.arguments["options"], machine(2), "router's key")
    router = understood(plan.router)
    expected |= {"cluster_secret_file": "router's key"}
    assert {name: getattr(router, name) for name in names} == expected


@pytest.mark.parametrize(
    ("options", "nice"),
    [
        (ClusterOptions(prefill=1, decode=1, device="cpu"), [10, None]),
        (ClusterOptions(prefill=1, decode=1, device="cuda"), [None, None]),
        (ClusterOptions(prefill=1, decode=1, device="cpu", compute_nice=0), [0, 0]),
        (ClusterOptions(prefill=0, decode=0, unified=2, device="cpu"), [None, None]),
    ],
)
def test_prefills_let_others_go_first(options, nice):
    assert [understood(process).compute_nice for process in plan_cluster(options, machine(4)).instances] == nice


def test_only_options_that_differ_are_sent():
    server = ServerOptions(chunked_prefill_size=-1, disable_radix_cache=True, model_path="a b", context_length=64)
    sent = ChildServer.of(server)
    assert sent.options == {
        "chunked_prefill_size": -1,
        "disable_radix_cache": True,
        "model_path": "a b",
        "context_length": 64,
    }
    assert sent.typed_options() == server
    assert ChildServer.of(RouterOptions()) == ChildServer("router", {})


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("server", {"page_size": 0}, "--page-size"),
        ("server", {"page_size": "16"}, "int"),
        ("router", {"worker": ["nowhere"]}, "nowhere"),
    ],
)
def test_a_process_refuses_options_that_cannot_work(command, options, said):
    with pytest.raises((ValueError, msgspec.ValidationError), match=said):
        ChildServer(command, options).checked_options()


def test_threads_beyond_an_instances_cores_leave_it_unbound():
    plan = plan_cluster(ClusterOptions(threads=2), machine(2))
    assert [understood(process).cpus for process in plan.instances] == [None, None]


@pytest.mark.parametrize(
    "options",
    [
        {"prefill": 0},
        {"decode": 0},
        {"prefill": 0, "decode": 0},
        {"unified": -1},
        {"max_restarts": -1},
        {"retries": -1},
        {"max_held_body_bytes": 1},
    ],
)
def test_clusters_that_cannot_work_are_refused(options):
    with pytest.raises(ClusterOptionsError):
        ClusterOptions(**options).check()


def test_cores_that_are_not_there_are_refused():
    with pytest.raises(ClusterOptionsError, match="may not use core 7"):
        plan_cluster(ClusterOptions(cpus="0,7"), machine(2))


@pytest.mark.parametrize("is_given", [False, True])
def test_the_router_inherits_a_routers_key_and_instances_the_secret(monkeypatch, tmp_path, is_given):
    (tmp_path / "secret").write_text("s" * 32)
    read = {}

    class Planned:
        """Looks at what each process is about to be given, in the place of starting it."""

        def __init__(self, options, plan):
            for process in plan.processes:
                path = understood(process).cluster_secret_file
                read[process.name] = Path(path).read_text(), process.descriptors, inherited_descriptors(path)

        def run(self):
            return 0

    monkeypatch.setattr(cluster, "Cluster", Planned)
    for name in ("harden", "configure_logging"):  # of this process
        monkeypatch.setattr(cluster, name, lambda *args, **options: None)
    monkeypatch.setattr(cluster.setproctitle, "setproctitle", lambda title: None)
    secret_file = str(tmp_path / "secret") if is_given else None
    assert cluster.run_cluster(ClusterOptions(port=0, cluster_secret_file=secret_file)) == 0
    secrets = {read[name][0] for name in ("prefill-0", "decode-0")}
    assert len(secrets) == 1
    key = ClusterSecret([secrets.pop().encode()]).for_routers().text()
    assert read["router"][0] == key
    for name, (_, inherited, needed) in read.items():
        assert inherited == needed
        assert len(needed) == (0 if is_given and name != "router" else 1)
