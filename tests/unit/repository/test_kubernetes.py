"""What docker/kubernetes/ names exists: options, ports, paths, pods, metrics and pages. Pods have few rights."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kubernetes import Manifests, Pod, command_of, in_bytes, selects
from support.kustomize import Resource, render, without_hashes
from support.router_memory import router_memory

from pdserve.router.options import RouterOptions, parse_prefill
from pdserve.runtime.cluster_secret import ClusterSecret, addresses
from pdserve.runtime.machine.control_groups import SystemTree, cpu_quota, memory_limits
from pdserve.runtime.options import check_options
from pdserve.runtime.web.apis import path_table
from pdserve.runtime.web.paths import Access, Server
from pdserve.server.cli import app
from pdserve.server.options import ServerOptions
from pdserve.server.supervisor import STOP_GRACE
from tests.unit.repository.test_dashboard import GROUPING, MATCHER, METRIC, SCRAPERS, instance_page, router_page

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "docker" / "kubernetes"
PAGE = ROOT / "docs" / "kubernetes.md"
OTHERS = ("monitoring", "leaderworkerset", "inferencepool")
FLEETS = {
    "cpu": ("cpu",),
    "gpu": ("gpu",),
    "cpu with all": ("cpu", "hpa", *OTHERS),
    "gpu with all": ("gpu", "keda", *OTHERS),
}
INSTANCES = ("prefill", "decode")
HAND_OVER_PORTS = {"prefill": {8998, 8999, 9000}, "decode": {8999, 9000}}
KUBECTL = shutil.which("kubectl")


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copy of the overlay of each fleet, with secrets and with its components switched on."""
    return {name: _copy(tmp_path_factory.mktemp("docker") / "docker", *parts) for name, parts in FLEETS.items()}


@pytest.fixture(scope="module")
def rendered(fleets: dict[str, Path]) -> dict[str, Manifests]:
    """The manifests of each fleet."""
    return {name: Manifests(render(overlay)) for name, overlay in fleets.items()}


@pytest.fixture(params=FLEETS)
def fleet(request: pytest.FixtureRequest, rendered: dict[str, Manifests]) -> Manifests:
    """The manifests of one fleet."""
    return rendered[request.param]


def _copy(docker: Path, overlay: str, *components: str) -> Path:
    shutil.copytree(ROOT / "docker", docker, ignore=shutil.ignore_patterns("secrets"))
    folder = docker / "kubernetes" / "base" / "secrets"
    folder.mkdir()
    (folder / "cluster").write_text(secrets.token_hex(32), encoding="ascii")
    keys = ClusterSecret.read(str(folder / "cluster"))
    assert keys is not None
    (folder / "router").write_text(keys.for_routers().text(), encoding="ascii")
    (folder / "metrics-key").write_text(secrets.token_hex(32), encoding="ascii")
    api_keys = f"first {secrets.token_hex(32)}\nmetrics {(folder / 'metrics-key').read_text(encoding='ascii')}\n"
    (folder / "api-keys").write_text(api_keys, encoding="ascii")
    (folder / "admin-key").write_text(secrets.token_hex(32), encoding="ascii")
    place = docker / "kubernetes" / "overlays" / overlay
    wanted = yaml.safe_load((place / "kustomization.yaml").read_text(encoding="utf-8"))
    wanted["components"] = [f"../../components/{name}" for name in components]
    (place / "kustomization.yaml").write_text(yaml.safe_dump(wanted), encoding="utf-8")
    return place


def options_of(pod: Pod, fleet: Manifests, folder: Path, rank: str = "0") -> Any:
    """Return the checked options of a pod's command. Raises if it would not start."""
    leader = "pdserve-group-0.pdserve-group"
    words = command_of(pod, fleet, folder, LWS_WORKER_INDEX=rank, LWS_LEADER_ADDRESS=leader)
    _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    options = bound.arguments["options"]
    if isinstance(options, RouterOptions):
        options.check()
    else:
        check_options(options)
    return options


def rank_of(pod: Pod) -> str:
    """Return the number that a LeaderWorkerSet's controller gives a pod."""
    return "1" if pod.component == "group-rank" else "0"


def test_every_container_starts_with_options_that_exist(fleet: Manifests, tmp_path: Path) -> None:
    for pod in fleet.pods:
        options = options_of(pod, fleet, tmp_path / pod.name, rank_of(pod))
        assert isinstance(options, RouterOptions if pod.component == "router" else ServerOptions)
        serves = pod.component != "group-rank"
        assert bool(options.api_key_file) == bool(options.admin_key_file) == bool(options.cluster_secret_file) == serves
        assert not options.no_keys
    assert {pod.component for pod in fleet.pods} >= {"router", *INSTANCES}


def test_instances_listen_where_their_containers_ports_are(fleet: Manifests, tmp_path: Path) -> None:
    for pod in fleet.pods:
        options = options_of(pod, fleet, tmp_path / pod.name, rank_of(pod))
        listening = {"http": options.port}
        if pod.component in INSTANCES:
            assert options.disaggregation_mode == pod.component
            assert options.advertise_host == "10.0.0.1"
            listening |= {"control": options.disaggregation_control_port, "data": options.disaggregation_data_port}
        if pod.component == "prefill":
            listening["bootstrap"] = options.own_bootstrap_port
        if pod.component == "group":
            listening["ranks"] = int(options.dist_init_addr.rpartition(":")[2])
        if pod.component == "group-rank":
            listening = {}  # only the first host serves HTTP, and has the port of --dist-init-addr
        assert pod.ports == listening


def test_services_lead_to_ports_of_the_pods_that_they_select(fleet: Manifests) -> None:
    for service in fleet.of("Service"):
        spec = service["spec"]
        [pod] = fleet.selected({"matchLabels": spec["selector"]})
        assert {port["targetPort"] for port in spec["ports"]} <= pod.ports.keys()
        if spec.get("clusterIP") == "None":
            # A name of a headless service leads to the pod itself, so its ports are the pod's.
            assert {port["name"]: port["port"] for port in spec["ports"]} == pod.ports
            assert spec["publishNotReadyAddresses"] is True
            assert pod.workload["spec"]["serviceName"] == service["metadata"]["name"]
    assert [s["metadata"]["name"] for s in fleet.of("Service") if "clusterIP" not in s["spec"]] == ["pdserve"]


def pod_names(fleet: Manifests, component: str, *, most: bool) -> list[str]:
    """Return the names of a pool's pods: those that always exist, or the ``most`` that there may be."""
    pod = fleet.pod(component)
    name, count = pod.name, pod.workload["spec"].get("replicas")
    scalers = [*fleet.of("HorizontalPodAutoscaler"), *fleet.of("ScaledObject")]
    for scaler in (s["spec"] for s in scalers if s["spec"]["scaleTargetRef"]["name"] == name):
        assert count is None, "the manifest and the autoscaler would both set the number"
        bounds = ("maxReplicas", "maxReplicaCount") if most else ("minReplicas", "minReplicaCount")
        count = next(scaler[bound] for bound in bounds if bound in scaler)
    return [f"{name}-{i}.{name}" for i in range(count)]


def test_the_router_knows_every_instance_by_a_stable_name(fleet: Manifests, tmp_path: Path) -> None:
    router = options_of(fleet.pod("router"), fleet, tmp_path)
    prefill, decode = (fleet.pod(component) for component in INSTANCES)
    assert parse_prefill(router.prefill) == [
        (f"http://{name}:{prefill.ports['http']}", prefill.ports["bootstrap"])
        for name in pod_names(fleet, "prefill", most=True)
    ]
    assert router.decode == [f"http://{name}:{decode.ports['http']}" for name in pod_names(fleet, "decode", most=True)]
    groups = [pod for pod in fleet.pods if pod.component == "group"]
    assert router.worker == [f"http://{pod.name.split()[0]}-0.{pod.name.split()[0]}:8000" for pod in groups]


def test_instances_drain_to_prefills_that_always_exist(fleet: Manifests, tmp_path: Path) -> None:
    always = {(name, fleet.pod("prefill").ports["bootstrap"]) for name in pod_names(fleet, "prefill", most=False)}
    assert len(always) >= 2
    for component in INSTANCES:
        options = options_of(fleet.pod(component), fleet, tmp_path / component)
        assert addresses("--drain-to", options.drain_to) == always


def test_pods_have_time_to_drain(fleet: Manifests, tmp_path: Path) -> None:
    for pod in fleet.pods:
        options = options_of(pod, fleet, tmp_path / pod.name, rank_of(pod))
        command = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert command[0] == "sleep"
        needed = int(command[1]) + options.drain_timeout + STOP_GRACE
        assert needed < pod.spec["terminationGracePeriodSeconds"] <= needed + 30


def test_the_router_closes_its_port_only_after_the_service_has_left_it_out(fleet: Manifests) -> None:
    command = fleet.pod("router").container["lifecycle"]["preStop"]["exec"]["command"]
    assert int(command[1]) >= 5


def test_probes_ask_paths_that_exist_and_need_no_key(fleet: Manifests) -> None:
    for pod in fleet.pods:
        probes = {name: probe for name, probe in pod.container.items() if name.endswith("Probe")}
        if pod.component == "group-rank":
            assert not probes
            continue
        table = path_table(Server.ROUTER if pod.component == "router" else Server.INSTANCE)
        for probe in probes.values():
            facts = table.find(probe["httpGet"]["path"])
            assert facts is not None
            assert (facts.access, "GET" in facts.methods) == (Access.OPEN, True)
            assert probe["httpGet"]["port"] == "http"
            # An instance answers /health within half a second, even if its other processes are silent.
            assert 1 < probe["timeoutSeconds"] < 10
        asked = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        start = "/livez" if pod.component == "router" else "/health"
        # A restart helps neither an instance that drains nor one that has released its memory.
        assert asked == {"startupProbe": start, "livenessProbe": "/livez", "readinessProbe": "/health"}


def test_startup_probes_allow_more_than_startup_timeout(fleet: Manifests, tmp_path: Path) -> None:
    for pod in fleet.pods:
        if probe := pod.container.get("startupProbe"):
            options = options_of(pod, fleet, tmp_path / pod.name)
            allowed = probe["periodSeconds"] * probe["failureThreshold"]
            assert allowed > getattr(options, "startup_timeout", 30)


def test_labels_fit_selectors(fleet: Manifests) -> None:
    for pod in fleet.pods:
        if pod.workload["kind"] != "LeaderWorkerSet":
            assert fleet.selected(pod.workload["spec"]["selector"]) == [pod]
        for spread in pod.spec.get("topologySpreadConstraints", []):
            assert fleet.selected(spread["labelSelector"]) == [pod]
    budgets = [budget["spec"] for budget in fleet.of("PodDisruptionBudget")]
    budgeted = [pod.component for budget in budgets for pod in fleet.selected(budget["selector"])]
    assert sorted(budgeted) == sorted(["router", *INSTANCES])
    assert all(budget["maxUnavailable"] == 1 for budget in budgets)
    for policy in fleet.of("NetworkPolicy"):
        assert fleet.selected(policy["spec"]["podSelector"]), policy["metadata"]["name"]
        for rule in [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]:
            for peer in [*rule.get("from", []), *rule.get("to", [])]:
                if "namespaceSelector" not in peer and "inferencepool" not in peer["podSelector"]["matchLabels"]:
                    assert fleet.selected(peer["podSelector"]), policy["metadata"]["name"]
    for pool in fleet.of("InferencePool"):
        [pod] = fleet.selected(pool["spec"]["selector"])
        assert [port["number"] for port in pool["spec"]["targetPorts"]] == [pod.ports["http"]]
    for monitor in fleet.of("PodMonitor"):
        assert fleet.selected(monitor["spec"]["selector"]) == fleet.pods


def test_only_the_router_is_reached_from_outside(fleet: Manifests) -> None:
    for pod in fleet.pods:
        is_router = pod.component == "router"
        for namespace in ("default", "pdserve"):
            assert fleet.reached(None, namespace, pod) == ({8000} if is_router else set())
    has_all = bool(fleet.of("PodMonitor"))
    for pod in fleet.pods:
        from_all: set[int | str] = {8000} if pod.component == "router" else set()
        from_prometheus = {8000} if has_all else from_all
        assert fleet.reached({"app.kubernetes.io/name": "prometheus"}, "monitoring", pod) == from_prometheus
        assert fleet.reached({"app.kubernetes.io/name": "other"}, "monitoring", pod) == from_all


def test_policies_admit_pods_of_other_namespaces_and_no_whole_namespace(fleet: Manifests) -> None:
    for policy in fleet.of("NetworkPolicy"):
        for rule in [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]:
            for peer in [*rule.get("from", []), *rule.get("to", [])]:
                assert peer["podSelector"]["matchLabels"], policy["metadata"]["name"]


def test_pods_reach_no_more_than_they_need(fleet: Manifests) -> None:
    groups = {"group", "group-rank"}
    for source in fleet.pods:
        for target in fleet.pods:
            ends = source.component, target.component
            if ends[0] in INSTANCES and ends[1] in INSTANCES:
                # A decode has no bootstrap port: nothing listens there.
                expected: set[int | str] = {8998, 8999, 9000}
                assert HAND_OVER_PORTS[ends[1]] == set(target.ports.values()) - {8000}
            elif ends[0] == "router" and ends[1] in (*INSTANCES, "group"):
                expected = {8000}
            elif set(ends) <= groups:
                expected = {"all"}
            else:
                expected = set()
            assert fleet.reached(source.labels, "pdserve", target) == expected, ends


def test_policies_leave_no_pod_free_and_only_dns_is_outside(fleet: Manifests) -> None:
    for pod in fleet.pods:
        assert fleet.reached(pod.labels, "pdserve", pod) != {"all"} or pod.component.startswith("group")
        outside = [
            (peer["podSelector"]["matchLabels"], sorted((p["protocol"], p["port"]) for p in rule["ports"]))
            for policy in fleet.of("NetworkPolicy")
            if selects(policy["spec"]["podSelector"], pod.labels)
            for rule in policy["spec"].get("egress", [])
            for peer in rule["to"]
            if "namespaceSelector" in peer
        ]
        assert outside == [({"k8s-app": "kube-dns"}, [("TCP", 53), ("UDP", 53)])]


def test_pods_have_few_rights(fleet: Manifests) -> None:
    for pod in fleet.pods:
        spec, context = pod.spec, pod.spec["securityContext"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers", "shareProcessNamespace"} & spec.keys()
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "secret", "emptyDir"}
        writable = {m["mountPath"] for m in pod.container["volumeMounts"] if not m.get("readOnly")}
        assert writable <= {"/tmp", "/home/pdserve/.cache"}
    assert fleet.get("ServiceAccount", "pdserve")["automountServiceAccountToken"] is False
    [namespace] = fleet.of("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.cuda"])
def test_pods_run_as_the_images_user_who_can_read_the_secrets(fleet: Manifests, dockerfile: str) -> None:
    [user] = re.findall(r"^USER (\d+)$", (ROOT / "docker" / dockerfile).read_text(), flags=re.MULTILINE)
    for pod in fleet.pods:
        context = pod.spec["securityContext"]
        assert [context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [int(user)] * 3
        modes = {v["secret"]["defaultMode"] for v in pod.spec["volumes"] if "secret" in v}
        assert modes == (set() if pod.component == "group-rank" else {0o440})


def test_pods_are_given_the_secrets_that_they_need(fleet: Manifests) -> None:
    given: dict[str, set[str]] = {pod.component: set() for pod in fleet.pods}
    for pod in fleet.pods:
        for volume in (volume for volume in pod.spec["volumes"] if "secret" in volume):
            given[pod.component] |= set(fleet.get("Secret", volume["secret"]["secretName"])["data"])
    assert given.pop("router") == {"router", "api-keys", "admin-key"}
    assert given.pop("group-rank", set()) == set()  # it has model workers alone, which read no key
    assert all(files == {"cluster", "api-keys", "admin-key"} for files in given.values())
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert "/docker/kubernetes/base/secrets/" in ignored


def test_the_product_understands_the_limits_of_instances(fleet: Manifests, tmp_path: Path) -> None:
    for pod in fleet.pods:
        limits, requests = (pod.container["resources"][name] for name in ("limits", "requests"))
        if pod.component == "router":
            assert limits["memory"] == requests["memory"]
            assert in_bytes(limits["memory"]) > router_memory(options_of(pod, fleet, tmp_path / pod.name))
            continue
        assert limits == requests  # a pod of the class Guaranteed: nothing takes its cores or memory away
        tree = SystemTree(tmp_path / pod.name / "proc", tmp_path / pod.name / "sys")
        (tree.proc / "self").mkdir(parents=True)
        (tree.proc / "self" / "cgroup").write_text("0::/\n", encoding="ascii")
        group = tree.sys / "fs" / "cgroup"
        group.mkdir(parents=True)
        (group / "cpu.max").write_text(f"{int(limits['cpu']) * 100_000} 100000\n", encoding="ascii")
        (group / "memory.max").write_text(f"{in_bytes(limits['memory'])}\n", encoding="ascii")
        (group / "memory.current").write_text("0\n", encoding="ascii")
        assert cpu_quota(tree) == int(limits["cpu"])
        assert [limit.limit for limit in memory_limits(tree)] == [in_bytes(limits["memory"])]


def test_instances_with_gpus_have_one_each_and_keep_their_kernels(rendered: dict[str, Manifests]) -> None:
    fleet = rendered["gpu"]
    for component in INSTANCES:
        pod = fleet.pod(component)
        assert pod.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert pod.container["image"].partition(":")[0] == "pdserve-cuda"
        [claim] = pod.workload["spec"]["volumeClaimTemplates"]
        [mount] = [m for m in pod.container["volumeMounts"] if m["name"] == claim["metadata"]["name"]]
        assert mount["mountPath"] == "/home/pdserve/.cache"
        assert claim["metadata"]["name"] not in {volume["name"] for volume in pod.spec["volumes"]}
    assert "nvidia.com/gpu" not in fleet.pod("router").container["resources"]["limits"]


def test_copies_of_a_config_differ_where_they_must() -> None:
    def read(*parts: str) -> dict[str, Any]:
        return yaml.safe_load(KUBERNETES.joinpath(*parts).read_text(encoding="utf-8"))

    for name in ("prefill.yaml", "decode.yaml"):
        base, gpu = read("base", "config", name), read("overlays", "gpu", "config", name)
        assert base | {"device": "cuda", "startup-timeout": 1200} == gpu
    base = read("base", "config", "router.yaml")
    for component in ("hpa", "keda"):
        scaled = read("components", component, "router.yaml")
        assert {key for key in base if base[key] != scaled[key]} == {"prefill", "decode"}
        assert base.keys() == scaled.keys()


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of each series that some page has."""
    pages = [instance_page("prefill"), instance_page("decode"), router_page()]
    return {name: page.labels(name) for page in pages for name in page.names()}


def queries_of(fleet: Manifests) -> list[str]:
    """Return the queries of alert rules and autoscalers."""
    alerts = [
        rule["expr"] for r in fleet.of("PrometheusRule") for group in r["spec"]["groups"] for rule in group["rules"]
    ]
    triggers = [trigger["metadata"]["query"] for s in fleet.of("ScaledObject") for trigger in s["spec"]["triggers"]]
    return alerts + triggers


@pytest.mark.parametrize("name", ["cpu with all", "gpu with all"])
def test_queries_find_their_series_and_labels(
    name: str, rendered: dict[str, Manifests], labels: dict[str, set[str]]
) -> None:
    queries = queries_of(rendered[name])
    assert len(queries) >= 12
    for query in queries:
        names = METRIC.findall(query)
        assert names
        assert set(names) <= labels.keys()
        groups = [label.strip() for group in GROUPING.findall(query.replace(", ", ",")) for label in group.split(",")]
        asked = {*groups, *MATCHER.findall(query.replace(", ", ","))}
        assert asked <= set.union(*(labels[name] for name in names)) | SCRAPERS | {"namespace", "pod"}, query
        assert query.count("(") == query.count(")")


def test_autoscalers_ask_for_metrics_that_pods_have(
    rendered: dict[str, Manifests], labels: dict[str, set[str]]
) -> None:
    scalers = rendered["cpu with all"].of("HorizontalPodAutoscaler")
    assert {s["spec"]["scaleTargetRef"]["name"] for s in scalers} == {f"pdserve-{c}" for c in INSTANCES}
    for metric in (metric["pods"]["metric"] for s in scalers for metric in s["spec"]["metrics"]):
        assert metric["name"] in labels
        assert set(metric.get("selector", {}).get("matchLabels", {})) <= labels[metric["name"]]
        # The page has the rule by which prometheus-adapter serves it.
        assert f"'{metric['name']}" in PAGE.read_text(encoding="utf-8")


def test_every_alert_has_a_section_that_explains_it(rendered: dict[str, Manifests]) -> None:
    [rules] = rendered["cpu with all"].of("PrometheusRule")
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    headings = re.findall(r"^### (\w+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [alert["alert"] for alert in alerts] == [h for h in headings if h.startswith("Pdserve")]
    for alert in alerts:
        assert alert["annotations"]["runbook_url"] == f"docs/kubernetes.md#{alert['alert'].lower()}"
        shown = re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])
        summed = GROUPING.findall(alert["expr"].replace(", ", ","))
        assert all(label in group.split(",") for label in shown for group in summed)


def test_prometheus_is_given_a_key_that_the_pods_know(rendered: dict[str, Manifests], tmp_path: Path) -> None:
    fleet = rendered["cpu with all"]
    [monitor] = fleet.of("PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["key"] in fleet.get("Secret", credentials["name"])["data"]
    for component in ("router", *INSTANCES):
        facts = path_table(Server.BOTH).find(endpoint["path"])
        assert facts is not None
        assert facts.access is Access.METRICS
        assert endpoint["port"] in fleet.pod(component).ports


def test_grafana_is_given_the_dashboard(rendered: dict[str, Manifests]) -> None:
    data = rendered["cpu with all"].get("ConfigMap", "pdserve-dashboard")["data"]
    assert json.loads(data["pdserve.json"]) == json.loads((ROOT / "docker" / "grafana" / "pdserve.json").read_text())


def test_the_endpoint_picker_reads_metrics_that_decodes_show(rendered: dict[str, Manifests], tmp_path: Path) -> None:
    options = options_of(rendered["cpu with all"].pod("decode"), rendered["cpu with all"], tmp_path)
    assert (options.metrics_aliases, options.metrics_without_key) == ("vllm", True)


def test_a_fleet_without_secrets_is_not_rendered(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docker", tmp_path / "docker", ignore=shutil.ignore_patterns("secrets"))
    with pytest.raises(FileNotFoundError, match="secrets/cluster"):
        render(tmp_path / "docker" / "kubernetes" / "overlays" / "cpu")


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl here")
@pytest.mark.parametrize("name", FLEETS)
def test_kubectl_renders_the_same(name: str, fleets: dict[str, Path], rendered: dict[str, Manifests]) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(fleets[name])],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    theirs = [document for document in yaml.safe_load_all(done.stdout) if document]
    made = {(r["kind"], r["metadata"]["name"]) for r in theirs}
    for pod in Manifests(theirs).pods:
        for volume in pod.spec["volumes"]:
            # A name that kustomize did not follow would lead to no object.
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in made
            assert "secret" not in volume or ("Secret", volume["secret"]["secretName"]) in made

    for secret in (r for r in theirs if r["kind"] == "Secret"):
        secret["data"] = {name: text.replace("\n", "") for name, text in secret["data"].items()}

    def by_name(resources: list[Resource]) -> dict[tuple[str, str], Resource]:
        return {(r["kind"], r["metadata"]["name"]): r for r in resources}

    assert by_name(without_hashes(theirs)) == by_name(rendered[name].resources)
