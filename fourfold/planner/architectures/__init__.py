"""Decoders in numbers: from a config.json, the header of a GGUF file, or a table of published models."""

from fourfold.planner.architectures.decoder import Architecture, Experts, Latent
from fourfold.planner.architectures.families import FAMILIES
from fourfold.planner.architectures.finding import FoundArchitecture, find_architecture

__all__ = ["FAMILIES", "Architecture", "Experts", "FoundArchitecture", "Latent", "find_architecture"]
