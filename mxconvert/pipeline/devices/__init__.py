"""GPUs beside the CPU's workers: the same pieces, the same buffers, the same bytes."""

from mxconvert.pipeline.devices.choice import Choice, choose
from mxconvert.pipeline.devices.pool import Devices, DeviceUse

__all__ = ["Choice", "DeviceUse", "Devices", "choose"]
