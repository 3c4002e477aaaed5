"""Reference and reward in a process of their own, asked over HTTP; docs/service.md has the format."""
