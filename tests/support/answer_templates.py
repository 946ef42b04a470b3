"""Chat templates that write calls, thoughts and results in the markup of published families, as short as that goes."""

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}{% endif %}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_TOOLS = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor "
    "%}\n</tools><|im_end|>\n{% endif %}"
)
_EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_TAGGED = "{{ v if v is string else v | tojson }}"

HERMES = _TOOLS + _CHATML.replace(
    "CALLS",
    _EACH
    + '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}',
)
QWEN3_CODER = _TOOLS + _CHATML.replace(
    "CALLS",
    _EACH
    + "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    + _TAGGED
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>"
    "{% if m.content %}\n{{ m.content }}{% endif %}"
    + _EACH
    + "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + _TAGGED
    + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}{% endif %}"
)
MINIMAX = (
    "{% for t in tools or [] %}<tool>{{ t.function | tojson }}</tool>\n{% endfor %}"
    "{% for m in messages %}]~b]{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}\n<minimax:tool_call>\n"
    + _EACH
    + '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments | items %}<parameter name="{{ k }}">'
    + _TAGGED
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]assistant\n<think>\n{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{% if m.tool_calls and m.content is none %}CALLS{% else %}{{ m.content }}{% if m.tool_calls and MIXED %}CALLS{% "
    "endif %}"
    "{% endif %}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_V3 = (
    "<｜tool▁calls▁begin｜>"
    + _EACH
    + "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments + '' }}\n```<｜tool▁call▁end｜>"  # noqa: E501
    "{% if not loop.last %}\n{% endif %}{% endfor %}<｜tool▁calls▁end｜>"
)
DEEPSEEK_V3 = _DEEPSEEK.replace("CALLS", _V3).replace("MIXED", "false")
_V31 = (
    "<｜tool▁calls▁begin｜>"
    + _EACH
    + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments + '' }}<｜tool▁call▁end｜>{% endfor "
    "%}<｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = _DEEPSEEK.replace("CALLS", _V31).replace("MIXED", "true").replace("<think>\n", "<think>")
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>namespace functions {% for t in tools %}{{ t.function.name }} = "
    "{{ t.function.parameters | tojson }};\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.content and m.tool_calls %}<|start|>assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% "
    "endif %}"
    + _EACH
    + "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson "
    "}}<|call|>{% endfor %}"
    "{% if not m.tool_calls %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ m.content | "
    "tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content "
    "}}[/INST]"
    "{% elif m.role == 'assistant' %}"
    "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content or '' }}CALLS{{ "
    "eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% "
    "endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% endif %}{% endfor %}"
)
_NINE = "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
MISTRAL = _MISTRAL.replace(
    "CALLS",
    "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    + _NINE
    + '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif '
    "%}",
)
MISTRAL_V11 = _MISTRAL.replace(
    "CALLS",
    _EACH + _NINE + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
)
LLAMA = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nRespond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.'
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif "
    "%}" + _EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor "
    "%}<|tool_calls_section_end|>"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GRANITE = (
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>"
    "{% if m.reasoning_content %}Here is my thought process:\n{{ m.reasoning_content }}\nHere is my response:\n{% "
    "endif %}"
    "{{ m.content or '' }}{% if m.tool_calls %}<|tool_call|>["
    + _EACH
    + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor '
    "%}]{% endif %}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
_LISTED = (
    '[{% for c in m.tool_calls %}{"NAME": "{{ c.function.name }}", "ARGS": {{ c.function.arguments | tojson '
    "}}}{% if not loop.last %}, {% endif %}{% endfor %}]"
)
_WITHOUT_CALLS = _TOOLS + _CHATML.replace("CALLS", "{% if m.tool_calls %}CALLS{% endif %}")


def _json_list(opens, closes, name="name", arguments="arguments"):
    """A template with calls in a JSON list between two marks."""
    calls = _LISTED.replace("NAME", name).replace("ARGS", arguments)
    return _WITHOUT_CALLS.replace("CALLS", opens + calls + closes)


_PYTHON = (
    "[{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments | items %}"
    "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% "
    "endfor %}]"
)
LFM2 = _WITHOUT_CALLS.replace("CALLS", f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>")
PYTHONIC = "{# [func_name1(param1=value1), func_name2()] #}" + _WITHOUT_CALLS.replace("CALLS", _PYTHON)
_DSML = _WITHOUT_CALLS.replace(
    "CALLS",
    "\n\n<｜DSML｜BLOCK>\n"
    + _EACH
    + '<｜DSML｜invoke name="{{ f.name }}">\n{% for k, v in f.arguments | items %}<｜DSML｜parameter name="{{ k }}"'
    + " string=\"{{ 'true' if v is string else 'false' }}\">"
    + _TAGGED
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜BLOCK>",
)
SEED = (
    QWEN3_CODER.replace("tool_call>", "seed:tool_call>")
    .replace("think>", "seed:think>")
    .replace("\n{{ v if v is string else v | tojson }}\n", "{{ v }}")
)
TEMPLATES = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM,
    "minimax_m2": MINIMAX,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "openai": HARMONY,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "llama3_json": LLAMA,
    "kimi_k2": KIMI,
    "granite": GRANITE,
    "minimax": _json_list("<tool_calls>", "</tool_calls>"),
    "nemotron": _json_list("<TOOLCALL>", "</TOOLCALL>"),
    "internlm": _json_list("<|action_start|><|plugin|>\n", "<|action_end|>"),
    "cohere_command3": _json_list("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters")
    .replace("<think>", "<|START_THINKING|>")
    .replace("</think>", "<|END_THINKING|>"),
    "lfm2": LFM2,
    "pythonic": PYTHONIC,
    "deepseek_v32": _DSML.replace("BLOCK", "function_calls"),
    "deepseek_v4": _DSML.replace("BLOCK", "tool_calls"),
    "seed_oss": SEED,
}
"""Templates by the name of their calls' format."""
