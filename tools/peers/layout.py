"""Where the peers' programs and the model's files lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdserve.model_files.model_path import EMBEDDED_MODEL, resolve_model


@dataclass(frozen=True)
class PeerSetup:
    """``build_dir``: everything that is installed, built or exported goes there, and nothing anywhere else.

    ``cores``: those that the servers may use, one thread each.
    """

    build_dir: Path
    cores: tuple[int, ...]

    @property
    def threads(self) -> int:
        """Compute threads of a whole deployment, however many servers it has."""
        return len(self.cores)

    @property
    def gguf(self) -> Path:
        """Path of the embedded model's GGUF file, which llama.cpp reads."""
        return resolve_model(EMBEDDED_MODEL).path

    @property
    def q4km(self) -> Path:
        """Path of a random model in Q4_K_M. K-quants need sizes that the real model does not have."""
        return self.build_dir / "random-q4_k_m.gguf"

    @property
    def hf_folder(self) -> Path:
        """Return the folder of the model dequantised to bf16, as vLLM and pdserve read it."""
        return self.build_dir / "smollm2-135m-bf16"

    @property
    def vllm_env(self) -> Path:
        """Folder of vLLM's virtual environment."""
        return self.build_dir / "vllm"

    @property
    def llama_env(self) -> Path:
        """Folder with the sources and the build of llama.cpp."""
        return self.build_dir / "llama.cpp"

    @property
    def llama_server(self) -> Path:
        """Path of the built llama-server."""
        return self.llama_env / "build" / "bin" / "llama-server"
