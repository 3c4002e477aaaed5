"""The two ways in which a run that was asked for properly can end early."""


class RunFailed(Exception):
    """The run cannot go on (exit code 3): the message names phase, role and what is kept.

    `blamed` says for programs who was at fault: a source of scores by the table of the settings that it stands in
    ('reward', 'reward.parts.NAME'), 'reward model', or 'reference' where it is not the actor as it starts; else "".
    """

    def __init__(self, said: str, *, blamed: str = "") -> None:
        super().__init__(said)
        self.blamed = blamed


class Interrupted(Exception):
    """The run was asked to stop, has saved its state and can be resumed (exit code 130)."""
