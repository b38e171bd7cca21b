"""The compose files and the systemd units give containers and services no more than they need."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.router_memory import router_memory

from pdserve.router.options import RouterOptions
from tests.unit.repository.test_packaging import COMPOSE, COMPOSE_CUDA, DOCKERFILES, ROOT, check_command, services_of

SYSTEMD = ROOT / "docker" / "systemd"
UNITS = pytest.mark.parametrize("unit", sorted(SYSTEMD.iterdir()), ids=lambda file: file.name)
HIGHEST_EXPOSURE = "25"
"""Exposure that `systemd-analyze security` may find, in tenths."""
COMPOSED = pytest.mark.parametrize("files", [(COMPOSE,), (COMPOSE, COMPOSE_CUDA)], ids=["cpu", "cuda"])
SWITCHED_ON = [
    "DynamicUser",
    "NoNewPrivileges",
    "ProtectHome",
    "PrivateTmp",
    "PrivateDevices",
    "ProtectKernelTunables",
    "ProtectKernelModules",
    "ProtectKernelLogs",
    "ProtectControlGroups",
    "ProtectClock",
    "ProtectHostname",
    "LockPersonality",
    "RestrictNamespaces",
    "RestrictRealtime",
    "RestrictSUIDSGID",
]


def file_of(*files: Path, section: str) -> dict:
    """Return a section of compose files that are merged in their order."""
    merged: dict = {}
    for file in files:
        merged |= yaml.safe_load(file.read_text()).get(section, {})
    return merged


@COMPOSED
def test_containers_can_do_little_and_take_a_limited_share_of_the_host(files):
    for name, service in services_of(*files).items():
        assert service["read_only"] is True, name
        assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["ulimits"]["core"] == 0
        assert service["pids_limit"] > 0
        assert service["mem_limit"] == service["memswap_limit"]
        assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & service.keys()


@COMPOSED
def test_only_the_router_is_reached_and_only_from_this_host(files):
    services, networks = services_of(*files), file_of(*files, section="networks")
    inner = {name for name, network in networks.items() if (network or {}).get("internal")}
    for name, service in services.items():
        if name == "router":
            assert all(port.startswith("127.0.0.1:") for port in service["ports"])
            assert set(service["networks"]) - inner
        else:
            assert "ports" not in service
            assert set(service["networks"]) <= inner
    assert set(services["router"]["networks"]) & inner


@COMPOSED
def test_the_router_is_given_its_own_key_and_secrets_are_files(files):
    services, secrets = services_of(*files), file_of(*files, section="secrets")
    assert services["router"]["secrets"] == ["router"]
    assert {tuple(services[name]["secrets"]) for name in ("prefill", "decode")} == {("cluster",)}
    # Compose can't put a secret from the environment into a container with a read-only root.
    assert all(set(secret) == {"file"} for secret in secrets.values())
    ignored = (ROOT / ".gitignore").read_text().split()
    assert all(f"/docker/{Path(secret['file']).parent}/" in ignored for secret in secrets.values())


@COMPOSED
def test_a_router_s_container_has_the_memory_that_its_limits_allow_it_to_hold(files):
    limit = services_of(*files)["router"]["mem_limit"]
    assert limit.endswith("g")
    assert int(limit[:-1]) << 30 > router_memory(RouterOptions())


@COMPOSED
def test_no_two_containers_write_to_one_volume(files):
    writable = [
        volume.split(":")[0]
        for service in services_of(*files).values()
        for volume in service.get("volumes", [])
        if not volume.endswith(":ro")
    ]
    assert len(writable) == len(set(writable))
    assert set(writable) <= file_of(*files, section="volumes").keys()


@pytest.mark.parametrize("file", [COMPOSE, COMPOSE_CUDA, *DOCKERFILES], ids=lambda file: file.name)
def test_commands_that_are_shown_publish_ports_on_loopback(file):
    shown = [line for line in file.read_text().splitlines() if line.startswith("#") and "docker run" in line]
    published = [port for line in shown for port in re.findall(r" -p (\S+)", line)]
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert published or file in (COMPOSE, COMPOSE_CUDA)


def service_of(unit: Path) -> configparser.SectionProxy:
    """Return the section [Service] of a unit."""
    parsed = configparser.ConfigParser(interpolation=None, strict=False)  # several LoadCredential
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit.read_text())
    return parsed["Service"]


def started_copy(unit: Path, folder: Path) -> Path:
    """Write a copy of a unit with a program that exists, since systemd looks for it; a template as its instance."""
    file = folder / unit.name.replace("@", "@decode-0")
    file.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text(), flags=re.MULTILINE))
    return file


def test_there_are_units_for_a_cluster_an_instance_and_a_router():
    names = {unit.name for unit in SYSTEMD.iterdir()}
    assert names == {"pdserve.service", "pdserve-server@.service", "pdserve-router.service"}


@UNITS
def test_a_unit_starts_what_exists_with_the_keys_that_it_loads(unit, tmp_path):
    program, *words = shlex.split(service_of(unit)["ExecStart"].replace("\\\n", " "))
    assert Path(program).name == "pdserve"
    loaded = re.findall(r"^LoadCredential=([\w-]+):", unit.read_text(), flags=re.MULTILINE)
    assert {word.partition("=%d/")[2] for word in words if "%d" in word} == set(loaded)
    options = "disaggregation-mode: decode\n"
    if words[0] == "router":
        options = "prefill: [http://10.0.0.5:30000]\ndecode: [http://10.0.0.6:30000]\n"
    for name in loaded:
        (tmp_path / name).write_text(options if name == "options" else f"{name}-{'k' * 64}")
    check_command([word.replace("%d", str(tmp_path)) for word in words])


@UNITS
def test_a_unit_s_service_can_do_little(unit):
    service = service_of(unit)
    assert [name for name in SWITCHED_ON if service.get(name) != "yes"] == []
    assert (service["ProtectSystem"], service["ProtectProc"]) == ("strict", "invisible")
    assert (service["CapabilityBoundingSet"], service["AmbientCapabilities"]) == ("", "")
    assert (service["UMask"], service["LimitCORE"]) == ("0077", "0")
    assert service["SystemCallFilter"] == "@system-service"
    assert {"MemoryMax", "TasksMax", "LimitNOFILE", "RestrictAddressFamilies"} <= service.keys()
    if unit.name == "pdserve-router.service":
        assert service["MemoryMax"].endswith("G")
        assert int(service["MemoryMax"][:-1]) << 30 > router_memory(RouterOptions())


@UNITS
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_understands_a_unit_and_finds_it_little_exposed(unit, tmp_path):
    file = started_copy(unit, tmp_path)
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    security = ["systemd-analyze", "security", "--offline=true", f"--threshold={HIGHEST_EXPOSURE}", str(file)]
    done = subprocess.run(security, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
