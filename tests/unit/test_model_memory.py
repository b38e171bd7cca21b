"""How much memory there is, and how many tokens of KV pool that makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.model_runner.device import Memory, choose_dtype, host_memory
from pdserve.model_runner.errors import NotEnoughMemory
from pdserve.model_runner.pool_size import PoolRequest, choose_max_total_tokens

GIB = 2**30
MIB = 2**20


def choose(
    device: str = "cpu",
    *,
    max_total_tokens: int | None = None,
    fraction: float | None = None,
    most_tokens: int = 10**9,
    memory: Memory = Memory(16 * GIB, 12 * GIB),  # noqa: B008 - immutable
) -> int:
    request = PoolRequest(max_total_tokens, fraction, 16, most_tokens)
    return choose_max_total_tokens(request, MIB, 2 * GIB, memory, device)


def test_fraction_of_an_accelerator() -> None:
    # free 12 − 16 × (1 − 0.75) = 8 GiB: 8192 pages, one of which is page 0.
    assert choose("cuda", fraction=0.75) == 8191 * 16


def test_fraction_of_a_host_counts_only_our_own_use() -> None:
    # 16 × 0.75 − 2 = 10 GiB.
    assert choose(fraction=0.75) == 10239 * 16
    # Others left 4 GiB, a tenth of which stays free.
    assert choose(fraction=0.75, memory=Memory(16 * GIB, 4 * GIB)) == (int(4 * 1024 * 0.9) - 1) * 16


def test_never_more_than_all_requests_can_fill() -> None:
    assert choose(most_tokens=1000) == 63 * 16


def test_explicit_tokens_are_floored_to_pages() -> None:
    assert choose(max_total_tokens=100) == 96


@pytest.mark.parametrize(
    ("tokens", "fraction", "says"),
    [
        (15, None, "less than a page"),
        (16 * 20000, None, r"takes 19.53 GiB, but 12.00 GiB are free; choose at most 196592"),
        (None, 0.1, "--mem-fraction-static 0.1 of 16.00 GiB leaves no room .* raise it"),
    ],
)
def test_misfits_say_what_to_do(tokens: int | None, fraction: float | None, says: str) -> None:
    with pytest.raises(NotEnoughMemory, match=says):
        choose(max_total_tokens=tokens, fraction=fraction)
    assert choose(max_total_tokens=196592) == 196592


def make_proc(folder: Path, cgroup: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    (folder / "proc/self/cgroup").write_text(cgroup)
    return folder / "proc"


def make_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_host_memory_without_limits(tmp_path: Path) -> None:
    make_group(tmp_path / "cg/a", memory__max="max\n", memory__current="5")
    assert host_memory(make_proc(tmp_path, "0::/a\n"), tmp_path / "cg") == Memory(16 * GIB, 8 * GIB)


def test_host_memory_in_a_nested_group(tmp_path: Path) -> None:
    """The tightest of the groups around the process counts; droppable file cache does not count as used."""
    make_group(tmp_path / "cg/a/b", memory__max="max", memory__current="1")
    stat = f"anon 5\ninactive_file {GIB}\n"
    make_group(tmp_path / "cg/a", memory__max=str(4 * GIB), memory__current=str(3 * GIB), memory__stat=stat)
    assert host_memory(make_proc(tmp_path, "0::/a/b\n"), tmp_path / "cg") == Memory(4 * GIB, 2 * GIB)


def test_host_memory_in_a_version_1_group(tmp_path: Path) -> None:
    make_group(
        tmp_path / "cg/memory",
        memory__limit_in_bytes=str(6 * GIB),
        memory__usage_in_bytes=str(GIB),
    )
    # The path is the host's; inside a container only the root of the mount exists.
    proc = make_proc(tmp_path, "5:cpu:/x\n4:memory:/docker/abc\n")
    assert host_memory(proc, tmp_path / "cg") == Memory(6 * GIB, 5 * GIB)


def test_dtype_auto_is_the_same_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for flags in ({"avx2", "avx512_bf16"}, {"avx2"}, set[str]()):
        monkeypatch.setattr("pdserve.model_runner.device.cpu_flags", lambda flags=flags: flags)
        assert choose_dtype("auto", cpu) == torch.bfloat16
    assert choose_dtype("float32", cpu) == torch.float32
    assert choose_dtype("float16", cpu) == torch.float16
