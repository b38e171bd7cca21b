"""Makes the executor of a model's device, and imports no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from .executor import Model, StepExecutor

if TYPE_CHECKING:
    from .device_executor import DeviceModel


def make_executor(model: Model, max_reqs: int) -> StepExecutor:
    """Make the executor for the device of ``model``, with a request table of ``max_reqs`` rows.

    It is a ``DeviceExecutor`` if the device computes beside the host, and else a ``HostExecutor``.
    """
    if model.device.beside:
        from .device_executor import DeviceExecutor

        return DeviceExecutor(cast("DeviceModel", model), max_reqs)
    from .host_executor import HostExecutor

    return HostExecutor(model, max_reqs)
