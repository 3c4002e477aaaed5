"""The commented configuration of `fourfold init`, and docs/configuration.md: both written from the schema.

`python -m fourfold.config.template > docs/configuration.md` brings the document up to date.
"""

from __future__ import annotations

import textwrap
from typing import Any

import tomli_w

from fourfold.config.describe import Setting, Table, tables

# What the template gives for settings without a default, so that it loads as it stands.
EXAMPLES: dict[str, Any] = {
    "output": "runs/first",
    "model.path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "data.texts.path": "data/texts.jsonl",
    "data.texts_test.path": "data/texts_test.jsonl",
    "data.pairs.path": "data/pairs.jsonl",
    "data.pairs_test.path": "data/pairs_test.jsonl",
    "data.prompts.path": "data/prompts.jsonl",
    "data.prompts_test.path": "data/prompts_test.jsonl",
    "ppo.target_kl": 0.05,
    "reward.parts.NAME.source": "rules",
    "reward.parts.NAME.rules.NAME.kind": "length",
}
# Optional tables that the default stages need.
GIVEN_TABLES = ("data.texts", "data.pairs", "data.prompts")

HEADER = """\
# A run of Fourfold. Start it with: fourfold run THIS_FILE
#
# '#key = value' shows a default: take the '#' away to change it. '# text' explains.
# Paths are relative to the folder that the command is started in. --set ppo.kl_coef=0.1 overrides a key for one run.
# extends = "other.toml" (a path seen from this file) at the top of a file takes its keys from there where it has none.
# A key that is unknown, or that would be ignored with the other settings, stops the run before anything is loaded.
"""


def commented_template() -> str:
    """A configuration with every key, what it means, what is allowed and its default; it loads as it stands."""
    parts = [HEADER]
    for table in tables():
        absent = table.optional and table.key not in GIVEN_TABLES
        lines = [f"# {line}" for line in textwrap.wrap(table.description, 116)]
        if table.key:
            lines.append(f"#[{table.key}]" if absent else f"[{table.key}]")
        # The data tables share their keys: they are explained at the first.
        explained = not _is_data(table) or table.key == GIVEN_TABLES[0]
        for setting in table.settings:
            lines += ["", *_explanation(setting)] if explained else []
            lines.append(_assignment(setting, absent))
        parts.append("\n".join(lines))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _is_data(table: Table) -> bool:
    return table.optional and table.key.startswith("data.")


def _explanation(setting: Setting) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(f"{setting.description} Allowed: {_allowed(setting)}.", 116)]


def _allowed(setting: Setting) -> str:
    if setting.required:
        return f"{setting.allowed}; must be given"
    return setting.allowed if setting.default is not None else f"{setting.allowed}; not given by default"


def _assignment(setting: Setting, absent: bool) -> str:
    value = EXAMPLES[setting.key] if setting.default is None else setting.default
    active = setting.required and not absent
    return f"{'' if active else '#'}{setting.name} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(inner) for inner in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml_value(inner)}' for name, inner in value.items())}}}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def configuration_markdown() -> str:
    """docs/configuration.md: a table of keys for each table of the configuration."""
    parts = [
        "# Configuration",
        "Written from the schema by `python -m fourfold.config.template`; `fourfold init` writes the same as a "
        "commented file.\n"
        "Defaults come first, then the file, then `--set KEY=VALUE`. A file that begins with `extends = 'other.toml'` "
        "(a path seen\nfrom its own folder) stands on top of that one, table by table. Unknown keys stop the run and "
        "name the nearest known one;\n"
        "so does a key that would be ignored with the other settings. The resolved configuration is saved in "
        "the run's folder.",
    ]
    data_tables = [table for table in tables() if _is_data(table)]
    for table in tables():
        if not _is_data(table):
            parts.append(f"## {f'`[{table.key}]`' if table.key else 'Top level'}")
            parts.append(f"{table.description}" if table.optional else "")
            parts.append(_markdown_table(table))
        elif table == data_tables[0]:
            names = "\n".join(f"- `[{t.key}]`: {t.description}" for t in data_tables)
            parts.append(f"### Data files\n\nEach of these tables is optional and takes the same keys:\n\n{names}")
            parts.append(_markdown_table(table))
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(table: Table) -> str:
    if not table.settings:
        return ""
    rows = ["| Key | Allowed | Default | Meaning |", "|---|---|---|---|"]
    for setting in table.settings:
        default = "must be given" if setting.required else "not given"
        if setting.default is not None:
            default = f"`{toml_value(setting.default)}`"
        cells = [f"`{setting.name}`", setting.allowed, default, setting.description]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(configuration_markdown(), end="")
