"""Checks of a running server or router: whether it answers, its health, and the reports of its instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import httpx
import msgspec

from ...messages.decode import UndeclaredMessage, decode, shown
from ...router.errors import parse_error
from ..access import KEY_FLAG, decoder_says, key_headers
from .finding import Finding, ok, problem, warning
from .server_info import InstanceReport, RoutedInstance, ServerReport

TIMEOUT_SECONDS = 8.0
"""A router asks its instances first, and waits 5 s for each."""
MAX_BYTES = 16 << 20
FEW = 0.05
"""A share of hand-overs that may fail without a word: each client that leaves before its first token fails one."""
TOPIC = "server"


class Unanswered(Exception):
    """A request without a usable response, with the finding to report."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


def look_at_server(url: str, api_key: str | None) -> Iterator[Finding]:
    """Examine the health of the server or router at ``url``, and what it reports about itself and its instances."""
    headers = key_headers(api_key)
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False) as http:
            health = ask(http, "/health")
            if health.status_code == httpx.codes.OK:
                yield ok(TOPIC, f"{url} is healthy")
            else:
                yield problem(TOPIC, f"{url} is not healthy: {error_message(health)}", "Its log says more.")
            info = ask(http, "/server_info")
    except Unanswered as e:
        yield e.finding
        return
    if info.status_code == httpx.codes.UNAUTHORIZED:
        refused = "refuses the key" if api_key is not None else "needs a key to report its state"
        yield problem(TOPIC, f"{url} {refused}", f"Name a file that holds it with {KEY_FLAG}.")
    elif info.status_code != httpx.codes.OK:
        yield problem(TOPIC, f"{url} does not report its state: {error_message(info)}")
    else:
        yield from judge_answer(url, info.content)


def error_message(response: httpx.Response) -> str:
    """Return the message of an error response, or its status if it has none."""
    error = parse_error(response.content)
    return shown(str(error["message"])) if error else f"status {response.status_code}"


def ask(http: httpx.Client, path: str) -> httpx.Response:
    """Return the server's response to GET ``path``, whatever its status.

    Raises ``Unanswered`` if the server can't be reached, does not answer in time or does not speak HTTP.
    """
    try:
        return http.get(path)
    except httpx.ConnectError as e:
        advice = "Start it, or check the host and port in --url."
        raise Unanswered(problem(TOPIC, f"no server answers at {http.base_url} ({shown(str(e))})", advice)) from e
    except httpx.TimeoutException as e:
        text = f"{http.base_url} did not answer {path} within {TIMEOUT_SECONDS:g} s"
        raise Unanswered(problem(TOPIC, text, "It hangs or is overloaded; its log may say why.")) from e
    except httpx.RequestError as e:
        raise Unanswered(problem(TOPIC, f"{http.base_url} does not speak HTTP ({shown(str(e))})")) from e


def judge_answer(url: str, body: bytes) -> Iterator[Finding]:
    """Judge ``body``, the answer of the server or router at ``url`` to GET /server_info."""
    try:
        report = decode(msgspec.json.Decoder(ServerReport), body, MAX_BYTES)
        if report.router is None:
            yield from judge_instance(url, decode(msgspec.json.Decoder(InstanceReport), body, MAX_BYTES))
            return
    except UndeclaredMessage as e:
        yield warning(TOPIC, f"{url} is no pdserve server, or of another version: {decoder_says(e)}")
        return
    if report.router.can_serve:
        yield ok("router", f"{url} can serve, with {_counted(report.instances)}")
    else:
        advice = "It needs a healthy prefill and a healthy decode, or a healthy worker."
        yield problem("router", f"{url} can't serve, with {_counted(report.instances)}", advice)
    for instance in report.instances:
        yield from judge_routed(instance)
    yield from judge_likeness(report.instances)


def judge_routed(instance: RoutedInstance) -> Iterator[Finding]:
    """Judge what a router reports of one of its instances, and that instance's own report, if it gave one."""
    name = f"{instance.role} {instance.url}"
    if instance.state == "unhealthy":
        yield problem(instance.role, f"{instance.url} is unhealthy: {shown(instance.reason)}", "Its log says more.")
    elif instance.state != "healthy":
        text = f"{instance.url} is {shown(instance.state)}: {shown(instance.reason)}"
        yield warning(instance.role, text, "Look again in a moment.")
    if instance.info is None or not instance.info.role:
        if instance.state == "healthy":
            yield warning(instance.role, f"{instance.url} is healthy, but does not report its state as pdserve does")
        return
    if instance.role not in (instance.info.role, "worker"):
        advice = f"Start it with --disaggregation-mode {instance.role}, or give the router its true role."
        yield problem(instance.role, f"{name} says that it is {instance.info.role}", advice)
    yield from judge_instance(instance.url, instance.info)


def judge_instance(url: str, info: InstanceReport) -> Iterator[Finding]:
    """Yield findings about the report of the instance at ``url``.

    The first one always comes: it describes the instance, at level ``OK``. What is wrong with it follows.
    If the report has hand-overs, findings about these and about the peers follow. Asks the instance nothing.
    """
    topic = info.role
    level = f", kernels at level {info.machine.kernel_level}" if info.machine.kernel_level else ""
    yield ok(
        topic,
        f"{url} is {info.status}: pdserve {info.version}, {info.model} on {info.device}{level}; "
        f"{info.queues.running} running, {info.queues.waiting} waiting, {info.pool.free + info.pool.cached} of "
        f"{info.pool.total} KV tokens to be had",
    )
    if info.invariants not in ("ok", None):
        yield problem(topic, f"{url}: its memory's books are wrong: {shown(info.invariants)}", "Report it; restart it.")
    if info.device == "cpu" and info.machine.kernel_level is None:
        yield warning(topic, f"{url} computes with PyTorch, several times slower", "pdserve check there says why.")
    if info.retractions:
        advice = "Its KV pool is small for its load: raise --mem-fraction-static, or lower --max-running-requests."
        yield warning(topic, f"{url} took memory back from requests {info.retractions} times", advice)
    if info.disaggregation is not None:
        yield from judge_handovers(url, info)


def judge_handovers(url: str, info: InstanceReport) -> Iterator[Finding]:
    """Judge the counts of failed hand-overs and the states of the peers that the instance at ``url`` reports.

    Its report must have them. Failures count as a warning above a share of ``FEW``.
    """
    report = info.disaggregation
    assert report is not None
    failed = report.sent.failed + report.received.failed
    total = report.sent.done + report.received.done + failed
    if failed > FEW * total:
        advice = "Clients that left meanwhile count, too. The logs of both sides name the others."
        yield warning(info.role, f"{url}: {failed} of {total} hand-overs failed", advice)
    states = Counter(peer.state for peer in report.peers)
    if not report.peers:
        yield ok(info.role, f"{url} knows no peer; they meet with their first request")
    elif set(states) == {"open"}:
        peers = f"{len(report.peers)} peer{'s' * (len(report.peers) > 1)}"
        yield ok(info.role, f"{url} is linked to {peers}, {total} hand-overs")
    for peer in report.peers:
        if peer.state != "open":
            name = peer.bootstrap or peer.epoch
            yield warning(info.role, f"{url}: the link to {shown(name)} is {shown(peer.state)}", "Its log says why.")


def judge_likeness(instances: Sequence[RoutedInstance]) -> Iterator[Finding]:
    """Yield findings if a router's instances differ in model or version, or if its pairs can't exchange KV.

    Instances without a report of their own are left out.
    """
    infos = [instance.info for instance in instances if instance.info is not None and instance.info.role]
    for what, values, advice in (
        ("models", {info.model for info in infos}, "A router's instances serve one model."),
        ("versions of pdserve", {info.version for info in infos}, "Update all of them."),
    ):
        if len(values) > 1:
            yield warning("router", f"its instances have different {what}: {', '.join(sorted(values))}", advice)
    legs = [info for info in infos if info.role in ("prefill", "decode")]
    if len({info.fingerprint for info in legs}) > 1:
        advice = "Start both sides with the same model, --dtype, --quantization and --quantized-activations."
        yield problem("router", "prefill and decode instances have different weights: no pair can hand over", advice)
    elif len({info.kv_layout for info in legs}) > 1:
        advice = "Start both sides with the same --page-size and --kv-cache-dtype."
        yield problem("router", "prefill and decode instances have different KV pages: no pair can hand over", advice)


def _counted(instances: Sequence[RoutedInstance]) -> str:
    roles = Counter(instance.role for instance in instances)
    return ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "no instances"
