"""The command line: one thin module a command, each with `add_arguments(parser)` and `run(args)`."""
