"""What a run stands on: devices, nodes and the links between them."""

from fourfold.planner.hardware.finding import find_hardware

__all__ = ["find_hardware"]
