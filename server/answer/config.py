"""Settings of what is found in answers."""

from typing import Annotated, Literal

from engine.shared.config import Section


class AnswerConfig(Section, frozen=True, kw_only=True):
    """Tool calls and reasoning"""

    enable_auto_tool_choice: Annotated[
        bool, "Let the model decide whether to call a tool (tool_choice auto)."
    ] = True
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "qwen", "qwen3_coder", "llama3_json", "mistral"],
        "How the model writes tool calls; auto: what its chat template shows; none: calls can "
        "only be enforced (tool_choice required or a named tool).",
    ] = "auto"
    exclude_tools_when_tool_choice_none: Annotated[
        bool, "Leave tools out of the prompt when tool_choice is none."
    ] = False
    reasoning_parser: Annotated[
        Literal["auto", "qwen3", "deepseek_r1", "mistral", "seed_oss", "tags"] | None,
        "How the model marks its reasoning, which is then answered as reasoning; auto: what its "
        "chat template shows; tags: see --reasoning-tags; default: reasoning stays in the "
        "content.",
    ] = None
    reasoning_tags: Annotated[
        tuple[str, ...], "Start and end of reasoning with --reasoning-parser tags."
    ] = ()
    reasoning_field: Annotated[
        Literal["both", "reasoning", "reasoning_content"],
        "By which name chat answers show reasoning: clients know either.",
    ] = "both"
