"""The ways in which a run that was asked for properly can end early."""


class RunFailed(Exception):
    """The run cannot go on (exit code 3): the message names phase, role and what is kept."""


class ScorerFailed(RunFailed):
    """A source of scores has none where the settings want one; `scorer` is the table of the settings that it
    stands in ('reward', 'reward.parts.NAME'), or 'reward model'."""

    def __init__(self, said: str, scorer: str) -> None:
        super().__init__(said)
        self.scorer = scorer


class Interrupted(Exception):
    """The run was asked to stop, has saved its state and can be resumed (exit code 130)."""
