"""Options of the model worker: types, the device, threads, GPUs, and approximations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..mem_cache.storage.options import TierOptions
from ..model_files.options import ModelOptions
from ..runtime.cpu_list import ThreadPlacementError, parse_cpus
from ..runtime.options import opt, section
from ..runtime.process_options import ChildOptions
from ..runtime.rank_options import RankOptions
from ..runtime.transfer_backends import BACKENDS
from ..scheduler.options import ScheduleOptions

AttentionBackendName = Literal["auto", "cpu", "torch", "triton", "flashinfer"]
MAX_NICE = 19
RECENT_TOKENS = 16
"""Newest tokens of a row, which --enable-double-sparsity attends to in any case."""


@section("Compute", order=80)
@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Options of the model worker on every device."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt(
        default="auto",
        help="Type of weights and activations. auto: bfloat16 (float16 on a GPU without it).",
    )
    quantization: Literal["auto", "none", "gguf", "int8", "int4", "packed", "w8a8"] = opt(
        default="auto",
        help=(
            "Weights of linear layers. none: as --dtype. gguf: the blocks of a GGUF file. int8, int4: rounded at "
            "start. packed: FP8, AWQ, GPTQ and INT4 as in the files (GPU with Triton). w8a8: FP8 weights with "
            "activations rounded to FP8, which changes answers. auto: gguf for a GGUF file unless --dtype names a "
            "type; packed where it is supported; else none."
        ),
    )
    weights_cache: str | None = opt(
        default=None,
        help=(
            "CPU only: folder for packed weights and measured times of steps. Instances with the same model map one "
            "copy, and later starts pack nothing. off: each instance packs a copy of its own. Default: "
            "pdserve/weights in the user's cache folder."
        ),
        not_empty=True,
    )
    quantized_activations: Literal["int16", "int8"] = opt(
        default="int16",
        help=(
            "CPU only: integer type of activations in products with quantised weights (gguf, int8, int4). int16 is "
            "nearly exact. int8 needs half of the arithmetic, with an error above that of bfloat16. Instances that "
            "differ do not exchange KV."
        ),
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"] = opt(
        default="auto",
        help=(
            "Type of the KV pool. auto: that of the weights. fp8_e4m3, fp8_e5m2, int8: one byte with a scale for "
            "each head of each token, nearly twice as many tokens as bfloat16. bf16 means bfloat16."
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = opt(
        default="auto",
        help="cpu or cuda. auto: cuda if there is one.",
    )
    threads: int | None = opt(
        default=None,
        help=(
            "Compute threads of the model worker. Default: one for each physical core of one NUMA node, without "
            "efficiency cores, within the CPU quota of control groups."
        ),
        at_least=1,
    )
    cpus: str | None = opt(
        default=None,
        help=(
            'Cores to bind compute threads to, such as "0,2-3". Default: not bound; threads float over the cores '
            "that --threads counts. With a GPU, threads float over these cores."
        ),
    )
    compute_nice: int | None = opt(
        default=None,
        help=(
            "Niceness of compute threads, 0 to 19; higher values let other processes run first. Default: 0, and 10 "
            "for a prefill that `pdserve up` starts beside decodes on a CPU."
        ),
    )
    adaptive_threads: bool = opt(
        default=True,
        help=(
            "Compute on fewer threads while other processes take cores from them: a thread that waits for a core "
            "holds up all others. Without it, one busy process on two cores costs half of the throughput."
        ),
    )
    attention_backend: AttentionBackendName = opt(
        default="auto",
        help=(
            "Implementation of attention: cpu (compiled kernels), flashinfer and triton (NVIDIA GPUs), torch "
            "(reference). auto: the best one that runs here."
        ),
    )
    profile_dir: str | None = opt(
        default=None,
        help=(
            "Folder for traces of POST /start_profile, one folder for each profile. Default: a folder in the run "
            "directory, which is deleted at the end."
        ),
        not_empty=True,
    )
    enable_nvtx: bool = opt(
        default=False,
        help=(
            "Name the phases of each step (prepare, forward, sample, copy) and the layers in NVTX ranges, for "
            "Nsight and for traces of POST /start_profile. Without a GPU, in the traces only. Layers in a CUDA "
            "graph have no names."
        ),
    )

    def problems(self) -> Iterator[str]:
        """Yield a message for each wrong option of this section."""
        if self.compute_nice is not None and not 0 <= self.compute_nice <= MAX_NICE:
            yield f"--compute-nice is {self.compute_nice}: it must be 0 to {MAX_NICE}"
        if self.cpus is not None:
            try:
                parse_cpus(self.cpus)
            except ThreadPlacementError as e:
                yield str(e)


@section("GPUs", order=85)
@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Options of GPUs."""

    base_gpu_id: int = opt(
        default=0,
        help="First GPU of this instance, counted from 0 among visible GPUs; other ranks take the next ones.",
    )
    flashinfer_workspace_size: int = opt(
        default=384,
        help="GPU memory for FlashInfer's partial results, in MiB.",
        at_least=1,
    )
    cuda_graph_bs: str | None = opt(
        default=None,
        help=(
            "Comma-separated batch sizes of decode steps to capture as CUDA graphs. Default: 1, 2, 4, multiples of "
            "8 up to 128, multiples of 16 beyond."
        ),
    )
    cuda_graph_max_bs: int | None = opt(
        default=None,
        help=(
            "Largest captured batch size if --cuda-graph-bs is not given. Default: --max-running-requests, at most "
            "256. With --tp-size, graphs are captured only if one of the two is given."
        ),
        at_least=1,
    )
    disable_cuda_graph: bool = opt(default=False, help="Launch each kernel of a decode step separately.")
    fail_on_host_sync: bool = opt(
        default=False,
        help="Fail if the launch of a step waits for the GPU. For tests.",
    )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Batch sizes in ``cuda_graph_bs``; empty if it is not set.

        Raises ``ValueError`` if it is no list of numbers.
        """
        return tuple(int(size) for size in (self.cuda_graph_bs or "").split(",") if size.strip())

    def problems(self) -> Iterator[str]:
        """Yield a message for each wrong option of this section."""
        if self.base_gpu_id < 0:
            yield f"--base-gpu-id is {self.base_gpu_id}: GPUs are counted from 0"
        try:
            sizes = self.graph_sizes
        except ValueError:
            sizes = (0,)
        if any(size < 1 for size in sizes):
            yield f"--cuda-graph-bs is {self.cuda_graph_bs}: it is batch sizes of 1 or more, like 1,2,4,8"
        if self.disable_cuda_graph and (sizes or self.cuda_graph_max_bs is not None):
            yield "--disable-cuda-graph leaves --cuda-graph-bs and --cuda-graph-max-bs without a meaning: drop them"


@section("Double Sparsity", order=90)
@dataclass(frozen=True, kw_only=True)
class SparsityOptions:
    """Options of attention to a part of the tokens."""

    enable_double_sparsity: bool = opt(
        default=False,
        help=(
            "Attend to few tokens in long requests: each generated token scores all tokens by a part of their keys "
            "(labels) and attends to the highest. Prompts attend in full. An approximation; needs "
            "--attention-backend torch."
        ),
    )
    ds_channel_config_path: str | None = opt(
        default=None,
        help="File with the label channels of the model's keys, written by `pdserve calibrate`.",
    )
    ds_heavy_channel_num: int | None = opt(
        default=None,
        help="Channels of a label. Default: a quarter of a head's.",
        at_least=1,
    )
    ds_heavy_token_num: int = opt(default=256, help="Tokens that a generated token attends to, including the last 16.")
    ds_sparse_decode_threshold: int = opt(
        default=4096,
        help="Number of visible tokens up to which a generated token attends to all of them.",
    )

    def problems(self) -> Iterator[str]:
        """Yield a message for each wrong option of this section."""
        path = self.ds_channel_config_path
        if not self.enable_double_sparsity:
            if path is not None:
                yield "--ds-channel-config-path is for --enable-double-sparsity: give both or neither"
            return
        if path is None:
            yield (
                "--enable-double-sparsity needs --ds-channel-config-path FILE: `pdserve calibrate` writes one for a "
                "model"
            )
        elif not Path(path).is_file():
            yield f"--ds-channel-config-path {path}: there is no such file; `pdserve calibrate` writes one"
        if self.ds_heavy_token_num < RECENT_TOKENS:
            yield (
                f"--ds-heavy-token-num is {self.ds_heavy_token_num}: the last {RECENT_TOKENS} tokens of a request are "
                "always among them, so it must be that many or more"
            )
        if self.ds_sparse_decode_threshold < 0:
            yield f"--ds-sparse-decode-threshold is {self.ds_sparse_decode_threshold}: it must be 0 or more"


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(
    ComputeOptions, GpuOptions, SparsityOptions, ScheduleOptions, TierOptions, ModelOptions, RankOptions, ChildOptions
):
    """Every option that the model worker's process reads."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each combination of options from several sections that can't work."""
        yield from self._rank_problems()
        yield from self._pool_problems()
        if self.hands_over:
            yield from BACKENDS[self.disaggregation_transfer_backend].check(self)
        if self.enable_double_sparsity:
            yield from self._sparsity_problems()

    def _rank_problems(self) -> Iterator[str]:
        if self.tp_size > 1 and self.device == "cuda" and self.hands_over:
            yield (
                f"--tp-size {self.tp_size} on GPUs leaves each its own heads of the KV, and a hand-over takes whole "
                "pages from one place: give an instance that exchanges KV one GPU (--tp-size 1)"
            )
        if self.threads is not None and self.threads % self.ranks_per_host:
            yield f"--threads {self.threads} does not divide among the {self.ranks_per_host} ranks of a host"
        if self.enable_hierarchical_cache and self.nnodes > 1:
            yield (
                "--enable-hierarchical-cache with --nnodes above 1 is not there yet, as each host has a part of the "
                "KV: give the instance all of its ranks on one host (--nnodes 1)"
            )

    def _pool_problems(self) -> Iterator[str]:
        if self.max_total_tokens_limit is None:
            return
        if self.nnodes > 1:
            yield (
                "--max-total-tokens-limit: the pools of ranks on several hosts (--nnodes) keep their size; leave it out"
            )
        backend = self.disaggregation_transfer_backend
        if self.hands_over and BACKENDS[backend].pins_pool:
            yield (
                f"--max-total-tokens-limit: {backend} registers the whole pool's memory at once; leave it out, or use "
                "--disaggregation-transfer-backend tcp or shm"
            )

    def _sparsity_problems(self) -> Iterator[str]:
        asked = "--enable-double-sparsity"
        if self.attention_backend != "torch":
            yield f"{asked} needs --attention-backend torch: the CPU kernels attend to all tokens"
        if self.kv_cache_dtype in ("fp8_e4m3", "fp8_e5m2", "int8"):
            yield f"{asked} and --kv-cache-dtype {self.kv_cache_dtype}: labels of one byte are not there; drop one"
        if self.tp_size > 1:
            yield f"{asked} and --tp-size {self.tp_size}: labels are not divided among ranks; drop one of the two"
