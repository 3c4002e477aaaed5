"""Roles are loaded one after the other within the memory budget; the one that does not fit is named (FAULTS J5)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fourfold.config.checks import roles_at_a_service
from fourfold.config.schema import RunConfig
from fourfold.memory.budget import Budget, Shortage, stops_when_short
from fourfold.planner.advice import TRAINED_TRUNK, Held, advice, mib
from fourfold.planner.quantization import QUANTIZED, held_bytes


@dataclass
class Room:
    """What the whole run is to hold, and what is loaded of it; batch sizes are no matter here and are never named."""

    config: RunConfig
    budget: Budget
    planned: Held
    loaded: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        budget: Budget,
        whole: int,
        own: int,
        layers: tuple[int, int],
        hidden: int,
        trunk: int = 0,
        matrices: tuple[int, int] = (0, 0),
    ) -> Room:
        """For a model of `whole` bytes of which a role copies `own`.

        `layers` are the model's and a role's own, `matrices` the float bytes of decoder layers' matrices in what is
        shared and in a role's copy, `trunk` the bytes of a trained trunk. One pass then gives the gradients of trunk,
        actor and critic, those of the trunk twice where they are measured; otherwise one role's are there at a time.
        """
        roles = ["actor", "critic", "reference", *(["reward"] if config.reward.of_the_base else [])]
        roles = [role for role in roles if role not in roles_at_a_service(config)]
        if config.reference.engine != "torch":
            roles.remove("reference")  # another engine's memory
        weights = {"trunk" if config.sharing.mode == "trunk" else "base": whole - own} | dict.fromkeys(roles, own)
        for role in ("reference", "reward"):
            if role in weights and (kind := getattr(config.precision, role)) in QUANTIZED:
                weights[role] += held_bytes(kind, matrices[1] // 4, hidden, 4) - matrices[1]
        weights[TRAINED_TRUNK] = trunk
        shares = (matrices[0] / max(whole - own, 1), matrices[1] / max(own, 1))
        planned = Held(
            weights={name: size for name, size in weights.items() if size},
            matrix_shares=shares,
            trained=2 * own + trunk,
            gradients=_gradients(config, own, trunk),
            states=4 * own + 2 * trunk,
            layers=layers[0],
            own_layers=layers[1],
            trunk_layers=layers[0] - layers[1] if trunk else 0,
            hidden=hidden,
        )
        return cls(config, budget, planned)

    @contextlib.contextmanager
    def role(self, name: str, wanted: int = 0) -> Iterator[None]:
        """Within, this role is loaded: `wanted` bytes more than are there; RunFailed where they do not fit."""
        with stops_when_short("load", name, self.budget, self._describe):
            self.budget.check(wanted)
            yield
            self.budget.check()
        self.loaded[name] = self.loaded.get(name, 0) + wanted

    def _describe(self, shortage: Shortage) -> str:
        loaded = replace(self.planned, weights=self.loaded, gradients=0, states=0).describe()
        proposed = "; ".join(map(str, advice("load", self.planned, self.config)[:3]))
        needed = sum(self.planned.weights.values()) + self.planned.gradients + self.planned.states
        need = f"; weights, gradients and optimizer states of the run need about {mib(needed)}" if needed else ""
        helps = proposed or "more memory, or a smaller model in model.path"
        return f"{shortage}. Loaded so far: {loaded}{need}. Would help most: {helps}"


def _gradients(config: RunConfig, own: int, trunk: int) -> int:
    """Bytes of the gradients that are there at a time, `own` those of one role."""
    if trunk:
        return own + trunk if config.trunk.alternate else 2 * own + 2 * trunk
    return 2 * own if config.precision.compute == "float16" else own  # docs/decisions/0009
