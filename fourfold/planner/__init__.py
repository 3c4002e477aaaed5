"""Arithmetic about a run (parameters, FLOPs) without torch, so that it answers at once."""
