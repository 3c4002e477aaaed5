"""How a training step is executed."""
