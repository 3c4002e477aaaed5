"""The settings of a run: schema, checks, loading from TOML and saving to it. No torch."""

from fourfold.config.loading import ConfigError, check_packages, check_paths, dump_toml, load_config
from fourfold.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "check_packages", "check_paths", "dump_toml", "load_config"]
