"""Says what torch is imported for. A worker of the C++ engine does without: the import takes 2 s and 200 MB."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger(__name__)


def note_torch(feature: str) -> None:
    """Log that torch is imported for ``feature``, if it is not imported yet. Call this before the import."""
    if "torch" not in sys.modules:
        log.info("torch is imported for %s", feature)


def use_one_torch_thread() -> None:
    """Limit torch to one compute thread in this process, whether it is imported already or later.

    The C++ engine has threads of its own. Torch's would spin on the same cores after each small operation.
    """
    # OpenMP reads it when it is loaded.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)
