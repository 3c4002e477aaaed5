"""What a run stands on: devices, nodes and the links between them."""
