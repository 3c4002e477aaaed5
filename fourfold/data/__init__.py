"""Data in: rows of files or hubs become records, records become token ids; no torch."""
