"""Roles are loaded one after the other within the memory budget; the one that does not fit is named (FAULTS J5)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fourfold.config.checks import roles_at_a_service
from fourfold.config.checks.critic import one_pass
from fourfold.config.schema import RunConfig
from fourfold.memory.budget import Budget, Shortage, stops_when_short
from fourfold.memory.precision import DTYPES, resolve_compute
from fourfold.planner.advice import STEP_0, TRAINED_TRUNK, Held, advice, mib
from fourfold.planner.quantization import QUANTIZED, held_bytes

# Roles with a language head.
POLICIES = ("actor", "reference", STEP_0)


@dataclass
class Room:
    """What the whole run is to hold, and what is loaded of it; batch sizes are no matter here and are never named."""

    config: RunConfig
    budget: Budget
    planned: Held
    copied: int = 0  # float32 bytes of a copy of the layers that every role has for its own
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
        vectors: int = 0,
        critic: int | None = None,
    ) -> Room:
        """For a model of `whole` bytes of which a role copies `own`, in float32, and the critic `critic` bytes, which
        is `own` where it is not given.

        `layers` are the model's and a role's own, `matrices` the float bytes of decoder layers' matrices in what is
        shared and in a role's copy, `vectors` those of a copy's norms and biases, `trunk` the bytes of a trained trunk.
        One pass then gives the gradients of trunk, actor and critic, those of the trunk twice where they are measured;
        otherwise one role's are there at a time.
        """
        roles = ["actor", "critic", "reference", *(["reward"] if config.reward.of_the_base else [])]
        roles = [role for role in roles if role not in roles_at_a_service(config)]
        if config.reference.engine != "torch" or config.reference.kind == "uniform":
            roles.remove("reference")  # another engine's memory, or none
        roles += [STEP_0] if config.reference.holds_step_0 else []
        # A policy's language head, where it is not the embedding's own tensor.
        head = whole - own if config.sharing.mode == "none" else 0
        weights = {"trunk" if config.sharing.mode == "trunk" else "base": whole - own - head}
        critic = own if critic is None else critic
        weights |= {role: own + head * (role in POLICIES) for role in roles} | {"critic": critic}
        compute = resolve_compute(config.precision.compute, budget.device)
        moving = config.reference.kind == "moving"  # float32 as the actor's
        types = {"reference": config.precision.reference, "reward": config.precision.reward, STEP_0: "auto"}
        for role, held in types.items():
            if role in weights and not (moving and role == "reference"):
                floats = (weights[role], vectors, matrices[1])
                adapted = config.sharing.mode == "adapters"
                weights[role] = _frozen_bytes(held, compute, adapted, floats, hidden)
        weights[TRAINED_TRUNK] = trunk
        shares = (matrices[0] / max(whole - own, 1), matrices[1] / max(own, 1))
        planned = Held(
            weights={name: size for name, size in weights.items() if size},
            matrix_shares=shares,
            trained=own + critic + head + trunk,
            gradients=_gradients(config, own + head, critic, trunk),
            states=2 * (own + critic + head + trunk),
            layers=layers[0],
            own_layers=layers[1],
            trunk_layers=layers[0] - layers[1] if trunk else 0,
            hidden=hidden,
        )
        return cls(config, budget, planned, own)

    @contextlib.contextmanager
    def role(self, name: str, wanted: int = 0) -> Iterator[None]:
        """Within, this role is loaded: `wanted` bytes more than are there; RunFailed where they do not fit."""
        with stops_when_short("load", name, self.budget, self._describe):
            self.budget.check(wanted)
            yield
            self.budget.check()
        self.loaded[name] = self.loaded.get(name, 0) + wanted

    def froze(self, name: str) -> None:
        """This role, which was loaded in float32, is now held as planned."""
        self.loaded[name] = self.planned.weights.get(name, 0)

    def _describe(self, shortage: Shortage) -> str:
        loaded = replace(self.planned, weights=self.loaded, gradients=0, states=0).describe()
        proposed = "; ".join(map(str, advice("load", self.planned, self.config)[:3]))
        needed = sum(self.planned.weights.values()) + self.planned.gradients + self.planned.states
        need = f"; weights, gradients and optimizer states of the run need about {mib(needed)}" if needed else ""
        helps = proposed or "more memory, or a smaller model in model.path"
        return f"{shortage}. Loaded so far: {loaded}{need}. Would help most: {helps}"


def _frozen_bytes(held: str, compute: str, adapted: bool, own: tuple[int, int, int], hidden: int) -> int:
    """Bytes of a frozen role, of whose own float32 ones some are vectors', which stay, and some are layers' matrices'.

    Float32 matrices whose numbers turn out to be bfloat16's take half of it.
    """
    total, vectors, matrices = own
    dtype = compute if held == "auto" or held in QUANTIZED else held
    if adapted and dtype == compute:
        return total  # as the trained adapters beside it
    quantized = matrices if held in QUANTIZED else 0
    floats = (total - vectors - quantized) * DTYPES[dtype].itemsize // 4
    return vectors + floats + held_bytes(held, quantized // 4, hidden, 4)


def _gradients(config: RunConfig, actor: int, critic: int, trunk: int) -> int:
    """Bytes of the gradients that are there at a time."""
    if trunk and one_pass(config):
        return actor + critic + 2 * trunk
    in_turns = trunk and config.trunk.alternate
    together = config.precision.compute == "float16" and not in_turns  # docs/decisions/0009
    return actor + trunk + critic if together else max(actor + trunk, critic)
