"""The tables of the settings, by what they are about; fourfold.config.schema puts them together."""
