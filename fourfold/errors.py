"""The two ways in which a run that was asked for properly can end early."""


class RunFailed(Exception):
    """The run cannot go on (exit code 3): the message names phase, role and what is kept."""


class Interrupted(Exception):
    """The run was asked to stop, has saved its state and can be resumed (exit code 130)."""
