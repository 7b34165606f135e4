"""The device that verl computes on, its precisions and its allocator."""

from verl.utils.device import get_device_id, get_device_name, get_torch_device, set_expandable_segments
from verl.utils.torch_dtypes import PrecisionType
