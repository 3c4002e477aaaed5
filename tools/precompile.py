"""Import what every run imports, once, so that Python keeps its bytecode: `python -m tools.precompile`.

`make` has pip compile nothing, because of torch and transformers a run imports a tenth. Where the environment forbids
Python to write bytecode (PYTHONDONTWRITEBYTECODE), every start would compile those 2,000 modules anew: half of the time
until a run draws its first token.
"""

import importlib
import sys

IMPORTED = (
    "fourfold.training.pipeline",
    "transformers.models.llama.modeling_llama",
    "fourfold.diagnostics.plan_tables",
)


def main() -> int:
    """Write the bytecode of all that is imported beside its source."""
    sys.dont_write_bytecode = False  # whoever sets an environment up has asked for its files
    from fourfold.models.pretrained import import_models

    import_models()
    for name in IMPORTED:
        importlib.import_module(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
