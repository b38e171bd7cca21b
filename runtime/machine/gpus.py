"""What the kernel shows of this host's NVIDIA GPUs, without any library of theirs."""

from __future__ import annotations

from pathlib import Path

from .control_groups import SystemTree


def may_use_gpu(device: str, dev: Path = Path("/dev")) -> bool:
    """Return whether ``--device`` asks for a GPU, or is auto on a host that has one (torch may still lack CUDA)."""
    if device != "auto":
        return device == "cuda"
    # Under WSL, all GPUs are behind one device of another name.
    return any(dev.glob("nvidia[0-9]*")) or (dev / "dxg").exists()


def numa_node_of(pci_address: str, tree: SystemTree = SystemTree()) -> int | None:  # noqa: B008
    """Return the NUMA node of a PCI device ("0000:3b:00.0"); None if the kernel does not tell."""
    try:
        node = int((tree.sys / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
