"""Checks of the project itself, run by `make check`."""
