"""The parts of a combined reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fourfold.config.sections.base import Count, NonNegativeFloat, PositiveInt, Section

FUNCTION = (
    "'module:name' of a Python function (source = 'function'): "
    "takes prompts and responses (lists of str), returns a list of float."
)
Number = Annotated[float, Field(allow_inf_nan=False)]


class ClassifierSection(Section):
    """What describes a text classifier of another family, alone or as a part."""

    model: str = Field(
        default="",
        description="Sequence classifier (source = 'model'), encoder or decoder, or a causal language model as judge: "
        "a Hugging Face directory with safetensors and tokenizer, or a hub id.",
    )
    label: dict[str, float] = Field(
        default_factory=dict,
        description="Factor of each logit that counts (source = 'model'), by its label in the model's config, such as "
        "{POSITIVE = 1.0, NEGATIVE = -1.0}; the score is the sum. A model with one logit needs none. Of a judge, "
        "a factor of the logit of each answer as the next token, such as {' yes' = 1.0, ' no' = -1.0}.",
    )
    template: str = Field(
        default="",
        description="What the model of source = 'model' reads. '': prompt and response as one text; 'pair': as the "
        "tokenizer's two segments; 'chat': as user and assistant in the chat template of its tokenizer; else a text "
        "with {prompt} and {response}. All are decoded without the actor's special tokens.",
    )
    max_tokens: Count = Field(
        default=0,
        description="Longest text in tokens of the model of source = 'model'; longer ones lose their beginning "
        "(special tokens stay). 0: as many as it has positions.",
    )
    device: Literal["auto", "cpu"] = Field(
        default="auto", description="Where the model of source = 'model' runs: where the others do, or on the CPU."
    )
    engine: Literal["torch", "onnx", "onnx_int8"] = Field(
        default="torch",
        description="What runs the model of source = 'model': torch, or ONNX Runtime on the CPU (extra onnx) with "
        "float32 or INT8 weights. Exported once into model.cache; at every start its scores are compared with torch's.",
    )


class RuleSection(Section):
    kind: Literal["regex", "keywords", "length", "excess", "format"] = Field(
        description="What of the response the rule looks at: matches of `pattern`; any of `words`; a length from "
        "`shortest` to `longest`; every `unit` outside that range ('excess'); a `format`."
    )
    score: Number = Field(default=1.0, description="What the rule adds to the part's score where it holds.")
    each: bool = Field(
        default=False, description="'regex', 'keywords': add the score once for every match, not once in all."
    )
    at_most: Count = Field(
        default=0, description="Matches or units that count at most ('excess', or each = true); 0: all of them."
    )
    inverted: bool = Field(default=False, description="Add the score where the rule does not hold ('excess': never).")
    pattern: str = Field(
        default="",
        description="Regular expression of Python's re, searched for in the response ('regex'); (?i) in front ignores "
        "case.",
    )
    words: tuple[str, ...] = Field(
        default=(),
        description="Words or phrases, found as whole words whatever their case ('keywords').",
        strict=False,
    )
    unit: Literal["words", "characters", "sentences", "lines"] = Field(
        default="words", description="What 'length' and 'excess' count."
    )
    shortest: Count = Field(default=0, description="Least length ('length', 'excess').")
    longest: Count = Field(default=0, description="Greatest length ('length', 'excess'); 0 is no limit.")
    format: Literal["ended", "one_line", "number", "json"] = Field(
        default="ended",
        description="'ended': the response ends with a full stop, an exclamation or a question mark (quotes and "
        "brackets may follow); 'one_line': it has no line break inside; 'number': it is one number; 'json': it is a "
        "JSON value.",
    )


class PartSection(ClassifierSection):
    source: Literal["function", "rules", "verifiable", "http", "model", "trained"] = Field(
        description="Where the part's score comes from: a Python function; the [reward.parts.NAME.rules.RULE]; the "
        "verifier of a task that the prompts come from; a service that speaks the JSON of docs/rewards.md; a text "
        "classifier of any family; the run's own reward model, which [reward] describes."
    )
    weight: Number = Field(
        default=1.0, description="Factor of the part's raw score in the sum. 0: it is logged, and not learned from."
    )
    function: str = Field(default="", description=FUNCTION)
    rules: dict[str, RuleSection] = Field(
        default_factory=dict,
        description="A rule of a part (source = 'rules'), by a name of yours; the part's score is the sum of its "
        "rules'.",
    )
    task: str = Field(
        default="",
        description="Name of a data set of reasoning-gym (source = 'verifiable', extra reasoning-gym), such as "
        "'leg_counting'; data.prompts.path = 'task:NAME' takes the prompts from it.",
    )
    task_settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of that data set, such as {min_animals = 1} (source = 'verifiable').",
    )
    size: PositiveInt = Field(default=500, description="Questions of data.prompts (source = 'verifiable').")
    seed: Count = Field(
        default=0,
        description="Seed of the questions (source = 'verifiable'); those of data.prompts_test have the next.",
    )
    prompt_template: str = Field(
        default="{question}",
        description="What becomes of a question (source = 'verifiable'): a text with {question}, or 'chat' for a "
        "user's turn in the chat template of the run's tokenizer.",
    )
    answer_tag: str = Field(
        default="",
        description="The answer is what stands last between <TAG> and </TAG> of the response (source = 'verifiable'); "
        "'': the whole response without spaces around it.",
    )
    url: str = Field(
        default="",
        description="Address that scores are asked of (source = 'http'), such as 'http://127.0.0.1:8777/v1/scores' of "
        "a `fourfold serve`.",
    )
    token_env: str = Field(
        default="",
        description="Name of the environment variable that holds the token of `url` (source = 'http'); empty: none.",
    )
    max_rows: PositiveInt = Field(default=256, description="Most rows in one request (source = 'http').")
    checkpoint: str = Field(
        default="",
        description="Folder of a trained reward model (source = 'trained'); '': the one that the stage reward trains.",
    )
    timeout_seconds: NonNegativeFloat = Field(
        default=60.0,
        description="Longest wait for one call of a function or verifier, or for the answer to one request; 0: as long "
        "as it takes ('function', 'verifiable').",
    )
    retries: Count = Field(
        default=2,
        description="How often a function that fails is called again, or a request sent again ('http': after 0.5, 1, "
        "2, ... s).",
    )
    on_failure: Literal["stop", "drop"] = Field(
        default="stop",
        description="What a part without a valid score does after the retries: stop the run, or drop the rows.",
    )
