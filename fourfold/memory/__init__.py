"""Measures that save memory or compute, one file each, and the meter that shows what they do."""
