"""Sampling: prompts in, rollouts with the trunk's activations out."""
