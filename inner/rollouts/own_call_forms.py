"""Forms of tool calls that no chat template of TRL's has, as response templates of transformers.

    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "…"}, …]     from v11: [TOOL_CALLS]f[ARGS]{}
    deepseek      <｜tool▁call▁begin｜>function<｜tool▁sep｜>f ```json {} ```     V3.1: f<｜tool▁sep｜>{}
    command       <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}, …]<|END_ACTION|>
    minimax, seed, glm 4.7      tags for each argument              phi 4      <|tool_call|>{…}<|/tool_call|>

call_forms.py takes a form only if it reads back what the model's template writes.

Not promised: a text between two calls; an argument whose text has the form's own marks.
"""

from collections.abc import Iterator
from typing import Any

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
NAMED = {"type": "function", "function": "{content}"}  # the JSON has `name` and `arguments`
TEXT = {"value_parser": {"name": "text"}}
TAGS = r'<parameter(?: name)?="?(?P<key>[^">\n]+)"?>\s*(?P<value>.*?)\s*</parameter>'
GLM_TAGS = r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"

FORMS: dict[str, dict[str, Any]] = {
    "mistral": {
        "open_pattern": r"(?:\[TOOL_CALLS\]\s*\[|,\s*)(?=\{\s*\"name\")",
        "close_pattern": r"(?=,\s*\{\s*\"name\")|\]\s*(?=</s>|$)",
        "content": "json", "transform": NAMED,
    },
    "mistral v11": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{\s]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?(?=\{)",
        "close_pattern": r"(?=\[TOOL_CALLS\]|</s>)|$",
        "content": "json", "transform": CALL,
    },
    "deepseek": {
        "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>\S+)"
        r"\s*```json\s*",
        "close_pattern": r"\s*```\s*<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
        "content": "json", "transform": CALL,
    },
    "deepseek v3.1": {
        "open_pattern": r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>\S+?)<｜tool▁sep｜>",
        "close_pattern": r"<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
        "content": "json", "transform": CALL,
    },
    "command": {
        "open_pattern": r"(?:<\|START_ACTION\|>\s*\[|,)\s*\{\s*\"tool_call_id\":\s*\"[^\"]*\",\s*\"tool_name\":\s*"
        r"\"(?P<name>[^\"]+)\",\s*\"parameters\":\s*",
        "close_pattern": r"\}(?=\s*,\s*\{\s*\"tool_call_id\")|\}\s*\]\s*<\|END_ACTION\|>\s*",
        "content": "json", "transform": CALL,
    },
    "minimax": {
        "open_pattern": r"\s*(?:<minimax:tool_call>\s*)?<invoke name=\"(?P<name>[^\"]+)\">",
        "close_pattern": r"</invoke>\s*(?:</minimax:tool_call>\s*)?",
        "content": "xml-inline", "content_args": {"tag_pattern": TAGS, **TEXT}, "transform": CALL,
    },
    "seed": {
        "open_pattern": r"\s*<seed:tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</seed:tool_call>\s*",
        "content": "xml-inline", "content_args": {"tag_pattern": TAGS, **TEXT}, "transform": CALL,
    },
    "glm 4.7": {
        "open_pattern": r"<tool_call>(?P<name>[^<\s]+)\s*(?=<arg_key>|</tool_call>)",
        "close_pattern": r"</tool_call>\s*",
        "content": "xml-inline", "content_args": {"tag_pattern": GLM_TAGS, **TEXT}, "transform": CALL,
    },
    "phi 4": {
        "open_pattern": r"<\|tool_call\|>", "close_pattern": r"<\|/tool_call\|>\s*",
        "content": "json", "transform": NAMED,
    },
}  # fmt: skip
THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
RESPONSE = {  # Command R7B's marks around thoughts and texts
    "reasoning_content": {"open": "<|START_THINKING|>", "close_pattern": r"<\|END_THINKING\|>\s*", "content": "text"},
    "content": {"open": "<|START_RESPONSE|>", "close_pattern": r"<\|END_RESPONSE\|>\s*|$", "content": "text"},
}


def own_forms() -> Iterator[tuple[str, Any]]:
    """Yield name and response template of each form. The opening and the end of a turn are the model's own."""
    for name, calls in FORMS.items():
        said = {"close_pattern": "$", "content": "text"}
        fields = {"reasoning_content": THOUGHT, "tool_calls": {**calls, "repeats": True}, "content": said}
        for more in ({}, RESPONSE) if name == "command" else ({},):
            yield name, {"defaults": {"role": "assistant"}, "start_anchor": "", "fields": {**fields, **more}}
