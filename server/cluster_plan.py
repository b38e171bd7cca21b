"""Turns the options of a cluster into the processes to start: names, ports, cores, options."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..router.options import RouterOptions
from ..runtime.cluster_secret import inherited_descriptors
from ..runtime.cpu_list import format_cores, parse_cpus
from ..runtime.disaggregation_options import DisaggregationMode
from ..runtime.fork_server import ForkOrder
from ..runtime.machine.choose_cores import compute_cores, quota_note
from ..runtime.machine.gpus import may_use_gpu
from ..runtime.machine.topology import Machine
from ..runtime.web.ports import LOOPBACK, free_ports, http_url
from .child_server import FORKS, INSTANCE, ROUTER, ChildServer
from .cluster_options import ClusterOptions, ClusterOptionsError
from .core_split import split_evenly, split_nodes
from .options import ServerOptions
from .process_table import shared_modules

DEVICE_SHARE = 0.88
"""Share of a GPU that an instance takes if it is alone there, see ``ServerOptions.mem_fraction_static``."""
PREFILL_NICE = 10
"""A tenth of the core for the compute thread while another process wants it."""


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a cluster. ``argv``: the words after the Python interpreter.

    ``command``: what it runs, which the process reads from its standard input. None: it reads nothing.
    ``descriptors``: of this process, that it inherits. ``fork_order``: how a fork server starts it at first, with
    ``modules`` for it and for its own processes. None: it is never forked.
    """

    name: str
    argv: tuple[str, ...]
    url: str
    command: ChildServer | None = None
    descriptors: tuple[int, ...] = ()
    fork_order: ForkOrder | None = None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterPlan:
    """What ``pdserve up`` starts."""

    instances: tuple[ProcessPlan, ...]
    router: ProcessPlan
    cores: str = ""
    """How the host's cores were divided, and why: for people."""

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        """All planned processes, the router last."""
        return (*self.instances, self.router)


class CoreShare(NamedTuple):
    """An instance's part of the host: ``--cpus`` and ``--threads``, None where it finds out itself."""

    cpus: str | None
    threads: int | None

    def __str__(self) -> str:
        threads = "" if self.threads is None else f" ({self.threads} thread{'s' * (self.threads > 1)})"
        return f"{self.cpus or 'any'}{threads}"


def plan_cluster(options: ClusterOptions, machine: Machine, router_key_file: str | None = None) -> ClusterPlan:
    """Choose ports, cores, memory and options for a cluster's instances and router. Start nothing.

    The ports are free now. ``router_key_file``: file that the router is given instead of the cluster's secret. Raises
    ``ClusterOptionsError``.
    """
    counts: dict[DisaggregationMode, int] = {
        "prefill": options.prefill,
        "decode": options.decode,
        "unified": options.unified,
    }
    modes = [mode for mode, count in counts.items() for _ in range(count)]
    ports = free_ports(2 * len(modes) + 1)
    shares, why = share_cores(options, machine, len(modes))
    memory = memory_share(options, len(modes))
    nice = prefill_nice(options)
    instances = []
    targets: dict[DisaggregationMode, list[str]] = {"prefill": [], "decode": [], "unified": []}
    for i, (mode, share) in enumerate(zip(modes, shares, strict=True)):
        port, bootstrap_port = ports[2 * i], ports[2 * i + 1]
        instance = options.instance_options(
            host=LOOPBACK,
            port=port,
            trusted_proxies=None,
            responses_dir=None,  # the router keeps responses
            send_timeout=2 * options.send_timeout,
            disaggregation_mode=mode,
            handover="on" if mode == "unified" and exchanges_kv(options) else options.handover,
            disaggregation_bootstrap_port=bootstrap_port,
            cpus=share.cpus,
            threads=share.threads,
            mem_fraction_static=memory,
            mem_instances=len(modes),
            compute_nice=nice if mode == "prefill" else options.compute_nice,
        )
        name = f"{mode}-{modes[: i + 1].count(mode) - 1}"
        url = f"http://{LOOPBACK}:{port}"
        instances.append(plan_process(name, url, instance))
        targets[mode] += [url, str(bootstrap_port)] if mode == "prefill" else [url]
    cores = "; ".join(f"{plan.name} {share}" for plan, share in zip(instances, shares, strict=True))
    router_options = replace(options, port=options.port or ports[-1], cluster_secret_file=router_key_file)
    return ClusterPlan(tuple(instances), plan_router(router_options, targets), f"{cores}: {why}")


def plan_router(options: ClusterOptions, targets: dict[DisaggregationMode, list[str]]) -> ProcessPlan:
    """Plan the router's process. ``targets``: for each mode, the instances' URLs as words of the command line.

    A prefill's URL is followed by its bootstrap port.
    """
    router = options.router_options(prefill=targets["prefill"], decode=targets["decode"], worker=targets["unified"])
    host = LOOPBACK if options.host in ("0.0.0.0", "::") else options.host
    url = http_url(host, router.port)
    return plan_process("router", url, router)


def plan_process(name: str, url: str, options: ServerOptions | RouterOptions) -> ProcessPlan:
    """Plan a process that runs an instance or a router with ``options``, and dies with the calling process.

    ``url``: base URL that it will serve. It inherits the descriptor of the cluster's secret if that file has no name.
    """
    module, parent = "pdserve.server.child_server", str(os.getpid())
    descriptors = inherited_descriptors(options.cluster_secret_file)
    modules: tuple[str, ...] = (module, ROUTER)
    arguments: tuple[str, ...] = (parent,)
    if isinstance(options, ServerOptions):
        modules, arguments = (module, INSTANCE, *shared_modules(options)), (parent, FORKS)
    order = ForkOrder(0, module, arguments, descriptors=descriptors, leads_group=True, takes_signals=True)
    return ProcessPlan(name, ("-m", module, parent), url, ChildServer.of(options), descriptors, order, modules)


def share_cores(options: ClusterOptions, machine: Machine, instances: int) -> tuple[list[CoreShare], str]:
    """Return the cores and the number of threads of each instance, and a sentence for users on how they were chosen.

    Raises ``ClusterOptionsError`` if ``--cpus`` names a core that this process may not use.
    """
    quota = machine.quota
    if options.cpus is not None:
        nodes = named_cores(options.cpus, machine)
        why = f"--cpus {options.cpus}"
    else:
        choice = compute_cores(machine)
        nodes = [list(cores) for cores in choice.nodes.values()]
        why = ", ".join(choice.notes)
    fed: list[int | None] = [None] * instances
    if quota is not None and quota < sum(map(len, nodes)):
        # As many for each rank.
        ranks = options.tp_size
        fed = [max(1, threads // ranks) * ranks for threads in split_evenly(int(quota), instances)]
        why += f", {quota_note(quota)} divided"
        if options.cpus is None:
            # A quota is what a host's guests have that don't own its cores: each guest that bound its threads would
            # take the same first ones.
            return [CoreShare(None, options.threads or threads) for threads in fed], why
    shares = []
    for cores, most in zip(split_nodes(nodes, instances), fed, strict=True):
        threads = options.threads or (most and max(min(most, len(cores)), options.tp_size))
        # More threads than cores of its own: the instance floats over all of them.
        fits = (threads or options.tp_size) <= len(cores)
        shares.append(CoreShare(format_cores(cores) if fits else None, threads))
    return shares, why


def named_cores(cpus: str, machine: Machine) -> list[list[int]]:
    """Return the cores that ``cpus`` names, such as "0,2-3", as one list for each NUMA node with any of them.

    Raises ``ClusterOptionsError`` if this process may not use one of them.
    """
    wanted = parse_cpus(cpus)
    if missing := sorted(set(wanted) - machine.allowed):
        raise ClusterOptionsError(
            f"--cpus {cpus}: this process may not use core {format_cores(missing)}, "
            f"only {format_cores(sorted(machine.allowed))}"
        )
    nodes = [[core for core in wanted if core in cores] for cores in machine.nodes.values()]
    return [cores for cores in nodes if cores]


def prefill_nice(options: ClusterOptions) -> int | None:
    """Return the niceness of the prefills' compute threads: as ``--compute-nice`` says, else ``PREFILL_NICE`` on CPUs.

    None leaves it unchanged: on a GPU, and without decode instances. All processes of the cluster, and its clients,
    want a core for a moment at each token. They should run on the cores of a prefill, not of a decode: a prefill's
    steps are long and delay few streams, mostly none.
    """
    if options.compute_nice is not None or not options.decode or _on_gpu(options):
        return options.compute_nice
    return PREFILL_NICE


def exchanges_kv(options: ClusterOptions) -> bool:
    """Return whether unified instances also compute one leg of a request and exchange its KV with other instances.

    By default they do if the cluster has prefill instances and no GPU.
    """
    return options.handover == "on" or (options.handover == "auto" and options.prefill > 0 and not _on_gpu(options))


def memory_share(options: ClusterOptions, instances: int) -> float | None:
    """Return each instance's ``mem_fraction_static``: the cluster's share divided by the number of instances.

    It is not divided if ``max_total_tokens`` is set. None leaves it to the instance, which on a CPU knows their number.
    On a GPU the default would suit a single instance, so ``DEVICE_SHARE`` is divided.
    """
    total = options.mem_fraction_static
    if instances == 1 or options.max_total_tokens is not None:
        return total
    if total is None and _on_gpu(options):
        total = DEVICE_SHARE
    return None if total is None else round(total / instances, 4)


def _on_gpu(options: ClusterOptions) -> bool:
    return may_use_gpu(options.device)
