"""Chat templates in the manner of the families that people bring, written for these tests."""

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Writes bos itself and trims contents (llama 3).
WRITES_BOS = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\n\n' + m['content'] | trim + '<|im_end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
)

# Refuses a system message and wants turns to alternate (gemma, mistral).
NO_SYSTEM = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

# Drops what it does not know without a word.
SILENT = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Thinking, tools, tool calls, a namespace, macros (qwen 3).
THINKING = """\
{%- macro turn(role, text) %}{{- '<|im_start|>' ~ role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson) ~ '</tool_call>' }}
        {%- endfor %}
        {%- generation %}{{- '<|im_end|>\\n' }}{%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- turn('user', '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>') }}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# Opens the thinking itself (deepseek r1).
OPENS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

# Makes a control token out of a role (phi 3).
SPELLS_ROLES = (
    "{% for m in messages %}{{ '<|' ~ m['role'] ~ '|>\n' ~ m['content'] ~ '<|end|>\n' }}{% endfor %}<|assistant|>\n"
)
