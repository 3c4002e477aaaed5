"""The maths of PPO from human feedback: tensors and floats in, tensors and floats out, no other package needed."""
