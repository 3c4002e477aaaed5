"""Scoring: reference, critic and reward look at a rollout."""
