"""What is shipped around the code agrees with the code: packages, pins, the compose file, the pages."""

from __future__ import annotations

import re
import runpy
import shlex
import tempfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.wheels import build_wheel, copy_tree

from pdserve.model_runner.cpu_engine.build import MODULE
from pdserve.runtime.options import check_options
from pdserve.runtime.web.apis import PATHS
from pdserve.server.cli import app
from pdserve.server.cluster_options import ClusterOptions
from pdserve.server.http.generation.abort import AbortBody
from pdserve.server.http.native.schemas import GenerateBody, SamplingParamsBody
from pdserve.server.http.openai.schemas import ChatBody, CompletionBody, StreamOptions
from pdserve.server.options import ServerOptions

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
COMPOSE = ROOT / "docker" / "compose.yaml"
COMPOSE_CUDA = ROOT / "docker" / "compose.cuda.yaml"
DOCKERFILES = [ROOT / "docker" / "Dockerfile", ROOT / "docker" / "Dockerfile.cuda"]
NOT_PRODUCT = {"tests", "docs", "docker", "examples", "tools", "build", "dist"}
SHIPPED = {".py", ".cpp", ".h", ".yaml"}
FOREIGN_FLAGS = {"--build", "--wait", "--help", "--mix", "--experts", "--chosen", "--inner", "--no-deps"}
FOREIGN_FLAGS |= {"--no-repack", "--wheels", "--only", "--dry-run", "--cache", "--page", "--limit"}
# llama.cpp's, and of make gpu-check
FOREIGN_FLAGS |= {"--answer"}  # of model_runner.kernels.activation_quality
FOREIGN_FLAGS |= {"--who", "--minutes"}  # of make hostile-campaign
FOREIGN_FLAGS |= {"--update", "--move", "--figures"}  # of tools.prose
FOREIGN_FLAGS |= {
    "--measure",
    "--channels",
    "--windows",
    "--label",
    "--kv-events-config",
    "--clusters",
    "--loads",
    "--seeds",
}  # of benchmarks of a module, and vLLM's
FOREIGN_FLAGS |= {"--rm", "--user", "--previous"}  # of docker and kubectl
FOREIGN_FLAGS |= {"--kubernetes-version", "--framework", "--compact", "--quiet", "--skip-download"}
# of kubernetes-validate and checkov
"""Flags that are not options, or not ours, and that the pages mention."""
SECRET_FILE = r"^(--cluster-secret-file=)?(?:\S*cluster(?:-secret)?|/run/secrets/router|keys)"


def check_command(words: list[str]) -> None:
    """Raise unless ``pdserve WORDS`` would start: names, values and combinations."""
    with tempfile.NamedTemporaryFile() as secret:
        secret.write(b"s" * 40)
        secret.flush()
        # A reader of the page has made this file.
        _check([re.sub(rf"{SECRET_FILE}$", rf"\g<1>{secret.name}", w) for w in words])


def _check(words: list[str]) -> None:
    _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    options = bound.arguments.get("options")
    if options is None:  # a command without any
        return
    if isinstance(options, ServerOptions) and not isinstance(options, ClusterOptions):
        check_options(options)
    else:
        options.check()


def compose_command(service: dict) -> list[str]:
    """Return a service's command, each ``${NAME:-default}`` replaced by its default."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]


def shown_commands(page: Path) -> list[list[str]]:
    """Return the words after ``pdserve`` of each line in a page's code blocks that begins with it."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pdserve ")]


def known_flags() -> set[str]:
    """Return every flag that the flags page lists; another test compares that page with the code."""
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    return {flag for names in re.findall(r"^\* `(--[^`]*)`", page, flags=re.MULTILINE) for flag in FLAG.findall(names)}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> list[str]:
    """The files in a wheel that is built from a copy of the tree."""
    source = copy_tree(tmp_path_factory.mktemp("source"))
    wheel = build_wheel(source, tmp_path_factory.mktemp("wheels"))
    # Without libraries in it, it suits every system.
    assert wheel.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_only_pdserve_is_installed(wheel_names):
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not re.fullmatch(r"pdserve-[\d.]+\.dist-info", top)} == {"pdserve"}


def test_all_of_the_product_is_installed(wheel_names):
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in NOT_PRODUCT]
    product = [
        f"pdserve/{file.relative_to(ROOT)}"
        for folder in folders
        if not folder.name.startswith(".")
        for file in folder.rglob("*.*")
        if file.suffix in SHIPPED
    ]
    assert len(product) > 100
    assert set(product) <= set(wheel_names)


def test_license_is_installed(wheel_names):
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


def test_every_dependency_is_pinned_within_its_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {}
    for pin in pins:
        [specifier] = pin.specifier
        assert specifier.operator == "==", pin
        versions[canonicalize_name(pin.name)] = specifier.version
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        wanted = Requirement(text)
        assert versions[canonicalize_name(wanted.name)] in wanted.specifier, wanted


def services_of(*files: Path) -> dict[str, dict]:
    """Return the services that ``docker compose -f FILE -f FILE`` starts. Fields of a later file replace
    earlier ones.
    """
    services: dict[str, dict] = {}
    for file in files:
        for name, service in yaml.safe_load(file.read_text())["services"].items():
            services[name] = services.get(name, {}) | service
    return services


COMPOSED = pytest.mark.parametrize("files", [(COMPOSE,), (COMPOSE, COMPOSE_CUDA)], ids=["cpu", "cuda"])


@COMPOSED
def test_compose_services_start(files):
    services = services_of(*files)
    assert set(services) == {"prefill", "decode", "router"}
    for service in services.values():
        check_command(compose_command(service))


@COMPOSED
def test_compose_services_are_where_the_router_and_the_health_checks_look(files):
    services = services_of(*files)
    router = compose_command(services["router"])
    for name, service in services.items():
        assert "--port=8000" in service["command"]
        # Of which the file for GPUs changes how long it may take, and no more.
        assert "127.0.0.1:8000/health" in services_of(COMPOSE)[name]["healthcheck"]["test"][-1]
        assert "test" not in services_of(COMPOSE_CUDA)[name].get("healthcheck", {})
    assert router[router.index("--prefill") + 1 :][:2] == ["http://prefill:8000", "8998"]
    assert "--disaggregation-bootstrap-port=8998" in services["prefill"]["command"]
    assert router[router.index("--decode") + 1] == "http://decode:8000"


def test_instances_of_the_cuda_compose_file_have_a_gpu_each_and_the_cuda_image():
    services = services_of(COMPOSE, COMPOSE_CUDA)
    assert {service["build"]["dockerfile"] for service in services.values()} == {"docker/Dockerfile.cuda"}
    gpus = []
    for name in ("prefill", "decode"):
        assert "--device=cuda" in services[name]["command"]
        [device] = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        gpus += device["device_ids"]
    assert len(set(gpus)) == 2


def stages(dockerfile: Path) -> tuple[str, str]:
    """Return the build stage and the final stage of a Dockerfile."""
    build, final = re.split(r"^FROM .*$", dockerfile.read_text(), flags=re.MULTILINE)[1:]
    return build, final


def base_images(dockerfile: Path) -> dict[str, str]:
    """Return the arguments of a Dockerfile that name a base image, with their defaults."""
    return dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", dockerfile.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_both_stages_use_a_base_image_that_a_build_can_pin(dockerfile):
    [(name, default)] = base_images(dockerfile).items()
    bases = re.findall(r"^FROM (\S+)", dockerfile.read_text(), flags=re.MULTILINE)
    assert bases == [f"${{{name}}}"] * 2
    assert re.fullmatch(r"[a-z/]+:[\w.-]+", default)
    assert not default.endswith(":latest")


def test_no_build_is_given_secrets_or_what_only_developers_need():
    ignored = [(file.parent / f"{file.name}.dockerignore").read_text().split("\n") for file in DOCKERFILES]
    assert ignored[0] == ignored[1]
    # Hidden files, among them .git and .venv; docker/ has the folders of secrets.
    assert {".*", "docker", "tests"} <= set(ignored[0])


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_the_image_carries_the_kernels(dockerfile):
    build, final = stages(dockerfile)
    installs = re.search(r"apt-get install .* g\+\+", build)
    compiles = re.search(rf"python3? -P -m {re.escape(MODULE)} --all$", build, flags=re.MULTILINE)
    itself = re.search(r"pip install -c \S+ --no-build-isolation ('\.\[[a-z,]+\]'|\.)", build)
    assert installs
    assert compiles
    assert itself
    assert itself.start() < compiles.start()
    # Into the environment that is copied, which has the same path in both stages.
    [folder] = re.findall(r"^COPY --from=build (\S+) \1$", final, flags=re.MULTILINE)
    assert re.search(rf"python3? -P -m venv {folder}\n", build)


def test_the_image_for_cpus_has_no_compiler():
    assert "apt-get" not in stages(DOCKERFILES[0])[1]


def test_the_image_for_gpus_has_the_extras_and_what_they_compile_with():
    build, final = stages(DOCKERFILES[1])
    [extras] = re.findall(r"pip install .* '\.\[([a-z,]+)\]'", build)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) == {"flashinfer", "triton"} <= set(project["optional-dependencies"])
    # One CUDA, and its nvcc.
    assert re.findall(r"^FROM (\S+)", DOCKERFILES[1].read_text(), flags=re.MULTILINE) == ["${CUDA_IMAGE}"] * 2
    assert "-devel-" in base_images(DOCKERFILES[1])["CUDA_IMAGE"]
    assert re.search(r"apt-get install .* g\+\+ python3-dev", final)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_the_image_runs_without_root_and_has_a_health_check(dockerfile):
    _, final = stages(dockerfile)
    [user] = re.findall(r"^USER (\d+)$", final, flags=re.MULTILINE)
    assert f"--uid {user} " in final
    assert user != "0"
    [check] = re.findall(r"^HEALTHCHECK .*\\\n  CMD (\[.*\])$", final, flags=re.MULTILINE)
    assert "127.0.0.1:8000/health" in yaml.safe_load(check)[-1]
    assert "EXPOSE 8000" in final


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfile_command_starts(dockerfile):
    [command] = re.findall(r"^CMD (\[.*\])$", dockerfile.read_text(), flags=re.MULTILINE)
    check_command(yaml.safe_load(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_start(page):
    for words in shown_commands(page):
        check_command(words)


def test_commands_are_found():
    assert sum(len(shown_commands(page)) for page in PAGES) >= 9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_on_a_page_exist(page):
    assert set(FLAG.findall(page.read_text(encoding="utf-8"))) - known_flags() - FOREIGN_FLAGS == set()


def test_flags_page_is_up_to_date():
    render = runpy.run_path(str(ROOT / "docs" / "generate_flags.py"))["render"]
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == render(), "run make docs"


def test_tables_of_metrics_are_up_to_date():
    render = runpy.run_path(str(ROOT / "docs" / "generate_metrics.py"))["render"]
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == render(), "run make docs"


def test_the_table_of_endpoints_is_up_to_date():
    render = runpy.run_path(str(ROOT / "docs" / "generate_endpoints.py"))["render"]
    assert (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8") == render(), "run make docs"


def test_tables_of_fields_are_up_to_date():
    render = runpy.run_path(str(ROOT / "docs" / "generate_fields.py"))["render"]
    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    assert page == render(), "run make docs"
    for row in ("| `temprature`", "| `bootstrap_room` | served"):
        assert row not in page
    assert re.search(r"^\| `audio` \|.* only `\{\}` \|", page, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_on_a_page_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def test_http_page_names_every_endpoint_and_field():
    text = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    for path in (facts.path for facts in PATHS):
        assert path.replace("{name:path}", "NAME").replace("{id:path}", "ID") in text, path
    for body in (GenerateBody, SamplingParamsBody, CompletionBody, ChatBody, StreamOptions, AbortBody):
        for name in body.model_fields:
            assert re.search(rf"[`.\"]{name}[`\"]", text), f"{body.__name__}.{name}"
