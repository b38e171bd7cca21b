"""What a made tree of kernel files says of a machine: limits of both versions of control groups, kinds of cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.model_runner.device.placement import machine_use, plan_placement
from pdserve.runtime.machine.control_groups import SystemTree, cpu_quota
from pdserve.runtime.machine.memory import Memory, host_memory
from pdserve.runtime.machine.topology import read_machine

GIB = 2**30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"


def make_tree(folder: Path, groups: str = "0::/\n", **files: str) -> SystemTree:
    """Make a system tree. ``groups``: /proc/self/cgroup. ``files``: below /sys, with "__" for "/" and "___" for "."."""
    texts = {f"sys/{name.replace('___', '.').replace('__', '/')}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": groups, "proc/meminfo": MEMINFO, **texts}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return SystemTree(folder / "proc", folder / "sys")


def groups(**files: str) -> dict[str, str]:
    return {f"fs__cgroup__{name}": text for name, text in files.items()}


def test_host_memory_without_limits(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, "0::/a\n", **groups(a__memory___max="max\n", a__memory___current="5"))
    assert host_memory(tree) == Memory(16 * GIB, 8 * GIB)


def test_host_memory_in_a_nested_group(tmp_path: Path) -> None:
    """The tightest of the groups around the process counts; droppable file cache does not count as used."""
    files = groups(
        a__b__memory___max="max",
        a__b__memory___current="1",
        a__memory___max=str(4 * GIB),
        a__memory___current=str(3 * GIB),
        a__memory___stat=f"anon 5\ninactive_file {GIB}\n",
    )
    assert host_memory(make_tree(tmp_path, "0::/a/b\n", **files)) == Memory(4 * GIB, 2 * GIB)


def test_host_memory_in_a_version_1_group(tmp_path: Path) -> None:
    """The path is the host's; inside a container only the root of the mount exists."""
    files = groups(memory__memory___limit_in_bytes=str(6 * GIB), memory__memory___usage_in_bytes=str(GIB))
    assert host_memory(make_tree(tmp_path, "5:cpu:/x\n4:memory:/docker/abc\n", **files)) == Memory(6 * GIB, 5 * GIB)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"a__b__cpu___max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a__b__cpu___max": "150000 100000\n", "a__cpu___max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a__b__cpu___max": "50000 50000\n", "a__cpu___max": "300000 100000\n"}, 1.0),
        # Above a namespace's root lies what is no control group of ours.
        ("0::/../other\n", {"cpu___max": "20000 10000", "..__other__cpu___max": "10000 10000"}, 2.0),
        ("3:cpu,cpuacct:/\n", {"cpu__cpu___cfs_quota_us": "-1", "cpu__cpu___cfs_period_us": "100000"}, None),
        ("3:cpu:/d\n0::/\n", {"cpu__cpu___cfs_quota_us": "50000", "cpu__cpu___cfs_period_us": "100000"}, 0.5),
        (
            "3:cpu,cpuacct:/d\n",
            {"cpu,cpuacct__d__cpu___cfs_quota_us": "75000", "cpu,cpuacct__d__cpu___cfs_period_us": "50000"},
            1.5,
        ),
        ("0::/u\n1:name=systemd:/u\n", {"unified__u__cpu___max": "400000 100000"}, 4.0),
    ],
)
def test_the_tightest_quota_counts(tmp_path: Path, membership: str, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(make_tree(tmp_path, membership, **groups(**files))) == quota


@pytest.mark.parametrize(
    ("membership", "files", "allowed"),
    [
        ("0::/a\n", {"a__cpuset___cpus___effective": "0-1\n", "cpuset___cpus___effective": "0-5"}, {0, 1}),
        ("0::/a\n", {"a__cpuset___cpus___effective": "\n"}, {0, 1, 2, 3}),
        ("2:cpuset:/a\n", {"cpuset__a__cpuset___cpus": "1,3,5"}, {1, 3}),
        ("2:cpuset:/a\n", {"cpuset__cpuset___cpus": "8-9"}, {0, 1, 2, 3}),
        ("0::/\n", {}, {0, 1, 2, 3}),
    ],
)
def test_cores_are_those_of_affinity_and_cpuset(
    tmp_path: Path, membership: str, files: dict[str, str], allowed: set[int]
) -> None:
    assert read_machine(range(4), make_tree(tmp_path, membership, **groups(**files))).allowed == allowed


V1 = groups(
    cpu__d__cpu___cfs_quota_us="50000",
    cpu__d__cpu___cfs_period_us="100000",
    memory__d__memory___limit_in_bytes=str(2 * GIB),
    memory__d__memory___usage_in_bytes=str(GIB // 2),
)
V2 = groups(
    d__cpu___max="50000 100000", d__memory___max=str(2 * GIB), d__memory___current=str(GIB // 2), cpu___max="max 100000"
)


@pytest.mark.parametrize(("membership", "files"), [("4:memory:/d\n3:cpu,cpuacct:/d\n0::/\n", V1), ("0::/d\n", V2)])
def test_half_a_core_and_2_gib_of_either_version(tmp_path: Path, membership: str, files: dict[str, str]) -> None:
    tree = make_tree(tmp_path, membership, **files)
    use = machine_use(plan_placement(None, None, read_machine(range(4), tree)), host_memory(tree))
    assert (use.threads, use.cpu_quota, use.memory_total, use.memory_free) == (1, 0.5, 2 * GIB, 3 * GIB // 2)
    assert use.reason == (
        "1 compute thread on cores 0-3: 4 allowed, a CPU quota of 0.5 cores; 1.5 of 2.0 GiB of memory free"
    )


def cores(name: str, *values: str) -> dict[str, str]:
    return {f"devices__system__cpu__cpu{cpu}__{name}": value for cpu, value in enumerate(values)}


def test_smt_siblings(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, **cores("topology__thread_siblings_list", "0,2", "1,3", "0,2", "1,3"))
    assert read_machine([0, 1, 2], tree).siblings == {0: {0, 2}, 1: {1, 3}, 2: {0, 2}}
    # A machine that tells nothing has none.
    assert read_machine([7], tree).siblings == {7: {7}}


@pytest.mark.parametrize(
    ("files", "slow"),
    [
        ({"devices__cpu_core__cpus": "0-1", "devices__cpu_atom__cpus": "2-9\n"}, {2, 3}),
        (cores("cpu_capacity", "446", "446", "1024", "980"), {0, 1}),
        (cores("cpufreq__cpuinfo_max_freq", "5800000", "5500000", "4300000", "4300000"), {2, 3}),
        (cores("cpufreq__cpuinfo_max_freq", "5800000"), set()),
        ({}, set()),
    ],
)
def test_efficiency_cores(tmp_path: Path, files: dict[str, str], slow: set[int]) -> None:
    assert read_machine(range(4), make_tree(tmp_path, **files)).slow == slow


def test_numa_nodes(tmp_path: Path) -> None:
    node = "devices__system__node__node{}__cpulist"
    tree = make_tree(tmp_path, **{node.format(0): "0-3", node.format(1): "4-7", node.format(2): "\n"})
    assert read_machine(range(2, 8), tree).nodes == {0: {2, 3}, 1: {4, 5, 6, 7}}
    assert read_machine(range(4), tree).nodes == {0: {0, 1, 2, 3}}
    # Cores that no node names: no word about nodes is to be trusted.
    assert read_machine(range(9), tree).nodes == {0: frozenset(range(9))}


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.allowed
    assert frozenset().union(*machine.nodes.values()) == machine.allowed
    assert host_memory().free <= host_memory().total
