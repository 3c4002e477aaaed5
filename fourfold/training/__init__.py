"""The stages sft, reward and ppo, and what keeps them safe: pre-flight checks and checkpoints."""
