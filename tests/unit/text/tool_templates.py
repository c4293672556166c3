"""Chat templates of several families, with the structure of the real ones, in our words."""

from __future__ import annotations

from foreword.text.chat import ChatTemplate

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else 'Be helpful.') }}
    {{- '\n\n# Tools\n\nSignatures:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' ~ tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nAnswer <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' ~ messages[0].content ~ '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if m.reasoning_content %}{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}{%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or m.content %}{{- '\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- (call.arguments | tojson) ~ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n' ~ system ~ '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{ raise_exception('Tools need a first user message!') }}{% endif %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond with {"name": function name, "parameters": values}.\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {{- first ~ '<|eot_id|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
        {{- '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\n\n' ~ m['content'] | trim ~ '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('This model takes one tool-call at once!') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' ~ call.name ~ '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- m.content | tojson if m.content is mapping or m.content is iterable else m.content }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = none %}{%- set turns = messages %}
{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in turns %}
    {%- if not (m.role == 'tool' or (m.role == 'assistant' and m.tool_calls is defined)) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' ~ (tool.function | tojson) ~ '}' }}
                {{- ', ' if not loop.last }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ (system ~ '\n\n' if loop.last and system else '') ~ m.content ~ '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('Bad id!') }}{% endif %}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}
            {{- ', ' if not loop.last else ']' ~ eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' ~ m.content ~ eos_token }}
    {%- elif m.role == 'tool' %}
        {%- set id = m.tool_call_id | default('') %}
        {%- if id | length != 9 %}{{ raise_exception('Bad id!') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' ~ m.content ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles') }}
    {%- endif %}
{%- endfor %}"""

MISTRAL_ARGS = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' ~ messages[0].content ~ '[/SYSTEM_PROMPT]' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '[INST]' ~ m.content ~ '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {%- set given = call.function.arguments %}
            {{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ (given if given is string else given | tojson) }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('Unknown role') }}{% endif %}
{%- endfor %}"""

GEMMA3 = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set prefix = (messages[0].content if messages[0].content is string else messages[0].content[0].text) ~ '\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set prefix = '' %}{%- set turns = messages %}
{%- endif %}
{%- for m in turns %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (prefix if loop.first) }}
    {%- if m.content is string %}{{- m.content | trim }}
    {%- else %}{%- for part in m.content %}{{- part.text | trim }}{%- endfor %}{%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

SMOLLM2 = """{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system
You are an assistant named Smol<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + m['role'] + '
' + m['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

SMOLLM3 = """{{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system') }}
{%- if tools %}
    {{- '\n### Tools\nCall <tool_call>{"name": <name>, "arguments": <object>}</tool_call>\n' }}
    {%- for tool in tools %}{{- tool | string ~ '\n' }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages if m.role in ('user', 'assistant') %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

TEXT_ARGUMENTS = """{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for m in messages %}
    {{- '<' ~ m.role ~ '>' ~ m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments + '}\n</tool_call>' }}
    {%- endfor %}
{%- endfor %}"""

FUNCTION_GEMMA = """{{ bos_token }}
{%- macro show(value) %}
    {%- if value is string %}{{- '<escape>' ~ value ~ '<escape>' }}
    {%- elif value is boolean %}{{- 'true' if value else 'false' }}
    {%- elif value is mapping %}
        {{- '{' }}
        {%- for key, entry in value | dictsort %}{{- key ~ ':' ~ show(entry) ~ (',' if not loop.last) }}{%- endfor %}
        {{- '}' }}
    {%- elif value is sequence %}
        {{- '[' }}{%- for entry in value %}{{- show(entry) ~ (',' if not loop.last) }}{%- endfor %}{{- ']' }}
    {%- else %}{{- value }}{%- endif %}
{%- endmacro %}
{%- set opens = messages[0].role in ('system', 'developer') %}
{%- if tools or opens %}
    {{- '<start_of_turn>developer\n' ~ (messages[0].content | trim if opens) }}
    {%- for tool in tools or [] %}
        {{- '<start_function_declaration>declaration:' ~ tool.function.name ~ show(tool.function.parameters) }}
        {{- '<end_function_declaration>' }}
    {%- endfor %}
    {{- '<end_of_turn>\n' }}
{%- endif %}
{%- set turns = messages[1:] if opens else messages %}
{%- for m in turns %}
    {%- if m.role == 'tool' %}
        {{- '<start_function_response>response:' ~ m.name ~ '{value:' ~ show(m.content) ~ '}<end_function_response>' }}
    {%- else %}
        {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ m.content | trim }}
        {%- for call in m.tool_calls or [] %}
            {%- set given = call.function.arguments %}
            {{- '<start_function_call>call:' ~ call.function.name }}
            {{- show(given) if given is mapping else '{' ~ given ~ '}' }}
            {{- '<end_function_call>' }}
        {%- endfor %}
        {{- '<end_of_turn>\n' if not m.tool_calls }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"

FAMILIES = {
    "qwen": QWEN,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "gemma3": GEMMA3,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": FUNCTION_GEMMA.replace("<start_function_call>", "<|tool_call>")
    .replace("<end_function_call>", "<tool_call|>")
    .replace("<escape>", '<|"|>'),
    "smollm2": SMOLLM2,
    "smollm3": SMOLLM3,
    "text arguments": TEXT_ARGUMENTS,
    "parts": PARTS,
}
TEMPLATES = {name: ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}) for name, text in FAMILIES.items()}
