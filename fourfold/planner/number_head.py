"""The numbers of a critic's or reward model's head: one a token, or one for each dimension."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class NumberHead:
    """A linear map to `outputs` numbers; with `width`, a layer of so many units for each of them beside it."""

    outputs: int = 1
    width: int = 0

    @classmethod
    def of_critic(cls, config: RunConfig) -> NumberHead:
        """The critic's, by `critic.heads`, or of an ensemble."""
        critic, outputs = config.critic, len(config.value_dimensions) or config.critic.ensemble
        return cls(outputs, critic.head_width if critic.heads == "multi" else 0)

    def matrices(self, hidden: int) -> list[int]:
        """Numbers in each of its matrices."""
        own = [self.outputs * self.width * hidden, self.outputs * self.width] if self.width else []
        return [self.outputs * hidden, *own]

    def numbers(self, hidden: int) -> int:
        """Of all its parameters, biases included."""
        return sum(self.matrices(hidden)) + self.outputs

    def products(self, hidden: int) -> int:
        """Multiply-adds a token."""
        return sum(self.matrices(hidden))


ONE_NUMBER = NumberHead()
