"""Settings for parsing tool calls and reasoning in answers."""

from typing import Annotated, Literal

from engine.shared.config import OneOf, Section


class AnswerConfig(Section, frozen=True, kw_only=True):
    """Tool calls and reasoning"""

    enable_auto_tool_choice: Annotated[
        bool, "Let the model decide whether to call a tool (tool_choice auto)."
    ] = True
    tool_call_parser: Annotated[
        str,
        OneOf(
            (
                "auto",
                "none",
                "command_r",
                "deepseek_v3",
                "deepseek_v31",
                "deepseek_v32",
                "functiongemma",
                "gemma4",
                "glm4",
                "glm45",
                "granite",
                "hermes",
                "internlm",
                "jamba",
                "kimi_k2",
                "lfm2",
                "llama3_json",
                "minimax_m2",
                "mistral",
                "nemotron",
                "olmo3",
                "openai",
                "phi4_mini",
                "pythonic",
                "qwen",
                "qwen3_coder",
                "qwen3_xml",
                "seed_oss",
                "step3",
                "xlam",
            ),
            "swell.tool_call_parsers",
        ),
        "Format of the model's tool calls; auto: detected from its chat template or family, else "
        "hermes, which the prompt then explains; none: only calls that the request enforces "
        "(tool_choice required or a named tool); or the name of a plugin.",
    ] = "auto"
    disable_additional_properties: Annotated[
        bool,
        "Objects of JSON schemas and of tools' arguments have only the properties that their "
        "schema lists, unless it says otherwise: small models tend to make up further ones.",
    ] = False
    exclude_tools_when_tool_choice_none: Annotated[
        bool, "Leave tools out of the prompt when tool_choice is none."
    ] = False
    reasoning_parser: Annotated[
        str,
        OneOf(
            (
                "auto",
                "none",
                "command_r",
                "deepseek_r1",
                "gemma4",
                "glm45",
                "granite",
                "mistral",
                "openai_gptoss",
                "qwen3",
                "seed_oss",
                "tags",
            ),
            "swell.reasoning_parsers",
        ),
        "Format of the model's reasoning, which is returned separately from the content; auto: "
        "detected from its chat template; tags: see --reasoning-tags; none: reasoning stays in "
        "the content; or the name of a plugin.",
    ] = "auto"
    reasoning_tags: Annotated[
        tuple[str, ...], "Start and end tag of reasoning, for --reasoning-parser tags."
    ] = ()
    reasoning_field: Annotated[
        Literal["both", "reasoning", "reasoning_content"],
        "Field(s) of chat answers that contain reasoning; clients support one or the other.",
    ] = "both"
