"""Lets models run on a device that records (``support/recording_device.py``), as if that were a GPU of each rank.

Every Python process with this folder in its path imports this file.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys


def use_recording_devices(module) -> None:
    """Have ``engines.load`` open devices that record."""
    from support.recording_device import RecordingDevice

    module.open_device = lambda *_args, **_more: RecordingDevice()


def use_static_attention(module) -> None:
    """Have ``engines.torch`` attend in plain torch."""
    from support.static_attention import StaticAttention

    module.make_attention_backend = lambda name, needs: StaticAttention(*needs[:2])


class Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once, and changes it after it was executed."""

    def __init__(self, name: str, change) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name, path, target=None):
        """See ``MetaPathFinder``."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            run(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder("pdserve.model_runner.engines.load", use_recording_devices))
sys.meta_path.insert(0, Finder("pdserve.model_runner.engines.torch", use_static_attention))
