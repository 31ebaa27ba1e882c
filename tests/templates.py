"""Chat templates of the kinds that models come with, written for the tests: what they do, not what they say."""

from __future__ import annotations

HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nTo call one, write <tool_call> JSON </tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Qwen's kind: tools in the system turn, calls in tags, results in a user turn."""

THINKING = HERMES.replace(
    "{{- '<|im_start|>assistant\\n' + message.content }}",
    "{{- '<|im_start|>assistant\\n' }}"
    "{{- message.content.split('</think>')[-1].lstrip('\\n') if loop.index0 < asked.at else message.content }}",
).replace(
    "\n{%- if tools %}",
    "\n{%- set asked = namespace(at=0) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set asked.at = loop.index0 %}{%- endif %}{%- endfor %}\n{%- if tools %}",
    1,
)
"""Qwen3's kind: reasoning stays until the next question, then it is dropped."""

LLAMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '<|start|>system<|end|>\\n\\n' + messages[0].content | trim + '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and tools %}
        {{- '<|start|>user<|end|>\\n\\nAnswer with {"name": function name, "parameters": ...} to call one of:\\n' }}
        {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
        {{- message.content | trim + '<|eot|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>ipython<|end|>\\n\\n' + message.content | tojson + '<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"""
"""Llama 3's kind: a beginning of sequence, trimmed contents, tools in the first question, a call is all of an answer."""

MISTRAL = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{%- set turns = namespace(number=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (turns.number % 2 == 0) %}
            {{- raise_exception('roles must alternate user/assistant') }}
        {%- endif %}
        {%- set turns.number = turns.number + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == (messages | map(attribute='role') | list).index('user') %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' }}
        {%- if loop.first and system is defined %}{{- system + '\\n\\n' }}{%- endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + '}[/TOOL_RESULTS]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool') }}
    {%- endif %}
{%- endfor %}"""
"""Mistral's kind: strict alternation, calls with ids of nine letters, a space that the open turn does not have."""

UNKNOWN_CALLS = HERMES.replace(
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name', "{{- '<tool_call>' + call.function.name"
)
"""Shows tools, and writes calls in a way of its own, in known tags."""

NO_CALLS = HERMES.replace("message.tool_calls or []", "[]")
"""Shows tools and says how to call them; leaves calls out of the history."""
