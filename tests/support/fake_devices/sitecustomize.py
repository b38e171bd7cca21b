"""Imported by every Python process that has this folder in its path: there, models run on a device that records
(``support/recording_device.py``), as if that were a GPU of each rank.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys

RUNNER = "pdserve.model_runner.engines.model_runner"


class Finder(importlib.abc.MetaPathFinder):
    """Finds the runner's module, once, and gives it other devices."""

    def find_spec(self, name, path, target=None):
        """See ``MetaPathFinder``."""
        if name != RUNNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            run(module)
            from support.recording_device import RecordingDevice
            from support.static_attention import StaticAttention

            module.open_device = lambda *_args, **_more: RecordingDevice()
            module.make_attention_backend = lambda name, needs: StaticAttention(*needs[:3])

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
