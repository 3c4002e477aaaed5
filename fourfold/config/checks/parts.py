"""The parts of a combined reward."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fourfold.config.checks.inputs import function_problem
from fourfold.config.checks.service import problem_of_url
from fourfold.config.checks.templates import unfit_template

if TYPE_CHECKING:
    from fourfold.config.schema import PartSection, RuleSection, RunConfig

NAME = "[a-z][a-z0-9_]*"
TASK = "task:"  # data.prompts.path = "task:NAME" takes the prompts of the verifiable part NAME


def reward_parts(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    yield from _prompts_of_tasks(config)
    if reward.source != "combined":
        return
    if not reward.parts:
        yield "reward.parts: none given, but reward.source = 'combined' adds them up; give [reward.parts.NAME] tables"
    elif not any(part.weight for part in reward.parts.values()):
        yield (
            "reward.parts: every weight is 0, so that all responses score alike; allowed: at least one weight that is "
            "not 0"
        )
    if len(trained := [name for name, part in reward.parts.items() if part.source == "trained"]) > 1:
        yield (
            f"reward.parts: {' and '.join(trained)} have source = 'trained', and a run has one reward model of its "
            "own; allowed: one such part"
        )
    for name, part in reward.parts.items():
        if not re.fullmatch(NAME, name) or name == "score":
            yield (
                f"reward.parts.{name}: given the name {name!r}, which metrics bear; allowed: small letters, digits and "
                "underlines, a letter first, but not 'score', which is the sum; try 'brevity'"
            )
        yield from _part(f"reward.parts.{name}", part)
    tasks = [name for name, part in reward.parts.items() if part.source == "verifiable"]
    if tasks and reward.weights == "sampled":
        yield (
            f"reward.weights: given 'sampled', which stand in front of every prompt, but the verifier of "
            f"reward.parts.{tasks[0]} finds a question by its prompt; allowed beside it: 'fixed'"
        )
    yield from _held_where(config)


def _part(key: str, part: PartSection) -> Iterator[str]:
    if part.source == "function":
        yield from function_problem(key, part.function)
    if part.source == "rules":
        if not part.rules:
            yield f"{key}.rules: none given; allowed: one [{key}.rules.RULE] table or more"
        for name, rule in part.rules.items():
            yield from _rule(f"{key}.rules.{name}", rule)
    if part.source == "verifiable":
        if not part.task:
            yield f"{key}.task: not given; allowed: the name of a data set of reasoning-gym, such as 'leg_counting'"
        if part.prompt_template != "chat" and (problem := unfit_template(part.prompt_template, "question")):
            yield (
                f"{key}.prompt_template: given {part.prompt_template!r}, {problem}; allowed: 'chat', or a text with "
                "{question}"
            )
        if set(part.task_settings) & {"size", "seed"}:
            yield f"{key}.task_settings: given size or seed, which have keys of their own: {key}.size and {key}.seed"
    if part.source == "http":
        if problem := problem_of_url(part.url):
            yield f"{key}.url: {problem}; allowed: an address such as 'http://127.0.0.1:8777/v1/scores'"
        if part.timeout_seconds == 0:
            yield f"{key}.timeout_seconds: given 0, but an answer to a request is never waited for without end"


def _rule(key: str, rule: RuleSection) -> Iterator[str]:
    if rule.kind == "regex":
        try:
            re.compile(rule.pattern)
        except re.error as error:
            yield f"{key}.pattern: given {rule.pattern!r}, which is no regular expression of Python ({error})"
        if not rule.pattern:
            yield f"{key}.pattern: not given; allowed: a regular expression, such as '!{{2,}}'"
    if rule.kind == "keywords" and not any(word.strip() for word in rule.words):
        yield f"{key}.words: not given; allowed: a list of words, such as ['gonna', 'kinda']"
    if rule.kind in ("length", "excess"):
        if (rule.shortest, rule.longest) == (0, 0):
            yield f"{key}: neither shortest nor longest is given, so that every length fits; give one of the two"
        if rule.longest and rule.shortest > rule.longest:
            yield f"{key}: shortest = {rule.shortest} is above longest = {rule.longest}; try swapping them"


def _prompts_of_tasks(config: RunConfig) -> Iterator[str]:
    """Prompts that come from a task, and tasks without prompts."""
    asked = {name: getattr(config.data, name) for name in ("prompts", "prompts_test")}
    named = {name: data.path.removeprefix(TASK) for name, data in asked.items() if data and data.path.startswith(TASK)}
    tasks = [name for name, part in config.reward.used_parts.items() if part.source == "verifiable"]
    for name, task in named.items():
        if task not in tasks:
            allowed = (
                f"'{TASK}' with one of {', '.join(tasks)}" if tasks else "a file: no part has source = 'verifiable'"
            )
            yield f"data.{name}.path: given {TASK + task!r}; allowed: {allowed}"
        if asked[name].columns:
            yield f"data.{name}.columns: given, but the questions of a task have no columns; leave it out"
    if "ppo" not in config.stages:
        return
    for task in tasks:
        for name, data in asked.items():
            if data is not None and named.get(name) != task:
                yield (
                    f"data.{name}.path: given {data.path!r}, but the verifier of reward.parts.{task} knows its own "
                    f"questions only; set it to '{TASK}{task}'"
                )
    if tasks and config.data.truncation in ("left", "right"):
        yield (
            f"data.truncation: given {config.data.truncation!r}, but the answer to a question that was cut cannot be "
            "verified; allowed beside source = 'verifiable': 'drop' or 'error'"
        )


def _held_where(config: RunConfig) -> Iterator[str]:
    """One residency for all reward models of a run, so those that not every one of them knows are refused."""
    residency, reward = config.reward.residency, config.reward
    if residency not in ("cpu", "service") or not reward.classifiers:
        return
    names = " and ".join(key.rpartition(".")[2] for key in reward.classifiers)
    instead = (
        "source = 'http' asks a `fourfold serve` of a run with that model"
        if residency == "service"
        else "a classifier has a `device` of its own"
    )
    yield (
        f"reward.residency: given {residency!r}, which the classifiers in reward.parts ({names}) do not know; allowed: "
        f"'keep', 'park' or 'stream'; {instead}"
    )
