"""Settings of what is found in answers."""

from typing import Annotated, Literal

from engine.shared.config import Section


class AnswerConfig(Section, frozen=True, kw_only=True):
    """Tool calls and reasoning"""

    enable_auto_tool_choice: Annotated[
        bool, "Let the model decide whether to call a tool (tool_choice auto)."
    ] = True
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "deepseek_v3",
            "deepseek_v31",
            "glm45",
            "granite",
            "hermes",
            "internlm",
            "llama3_json",
            "mistral",
            "openai",
            "pythonic",
            "qwen",
            "qwen3_coder",
            "qwen3_xml",
        ],
        "How the model writes tool calls; auto: as its chat template or its family says, else "
        "as hermes, which the prompt then explains; none: only calls that the request enforces "
        "(tool_choice required or a named tool).",
    ] = "auto"
    exclude_tools_when_tool_choice_none: Annotated[
        bool, "Leave tools out of the prompt when tool_choice is none."
    ] = False
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "deepseek_r1",
            "glm45",
            "granite",
            "mistral",
            "openai_gptoss",
            "qwen3",
            "seed_oss",
            "tags",
        ]
        | None,
        "How the model marks its reasoning, which is returned apart from the content; auto: as "
        "its chat template shows; tags: see --reasoning-tags; default: reasoning stays in the "
        "content.",
    ] = None
    reasoning_tags: Annotated[
        tuple[str, ...], "Start and end tag of reasoning, for --reasoning-parser tags."
    ] = ()
    reasoning_field: Annotated[
        Literal["both", "reasoning", "reasoning_content"],
        "Name of the field that holds reasoning in chat answers; clients know one or the other.",
    ] = "both"
