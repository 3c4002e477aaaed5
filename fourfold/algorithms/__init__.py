"""The maths of PPO from human feedback: tensors and floats in, tensors and floats out; nothing else of Fourfold is imported."""
