"""Chat templates of published models: they render as the models' own do for conversations without tool calls."""

_ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
_TURN = "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_TOOL_IN_USER_TURN = (
    "{% elif m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_SPLIT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}"
)
_LLAMA_3_TURN = "'<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>'"
_LLAMA_3_ASK = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
_GEMMA_ASK = "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
_REFUSE = "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}"

CHATML = f"{{% for m in messages %}}{_TURN}{{% endfor %}}{_ASK}"

LLAMA_2 = (
    f"{_SPLIT_SYSTEM}{{% for m in turns %}}{_ALTERNATE}"
    "{% set content = m['content'] %}{% if loop.first and system is defined %}"
    "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + content %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'system' %}{{ '<<SYS>>\n' + content.strip() + '\n<</SYS>>\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

LLAMA_3 = (
    f"{{% for m in messages %}}{{% if loop.first %}}{{{{ bos_token }}}}{{% endif %}}{{{{ {_LLAMA_3_TURN} }}}}"
    f"{{% endfor %}}{_LLAMA_3_ASK}"
)

LLAMA_3_2 = (  # dates in the system turn, which every conversation has
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' }}"
    "{{ strftime_now('%d %b %Y') + '\n\n' + system + '<|eot_id|>' }}"
    "{% for m in messages %}{% if m['role'] in ('tool', 'ipython') %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m['content'] | tojson + '<|eot_id|>' }}"
    f"{{% else %}}{{{{ {_LLAMA_3_TURN} }}}}{{% endif %}}{{% endfor %}}{_LLAMA_3_ASK}"
)

GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    f"{{% for m in messages %}}{_ALTERNATE}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    f"{{{{ m['content'] | trim + '<end_of_turn>\n' }}}}{{% endfor %}}{_GEMMA_ASK}"
)

GEMMA_3 = (
    f"{{{{ bos_token }}}}{_SPLIT_SYSTEM}{{% for m in turns %}}{_ALTERNATE}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{{ system + '\n\n' if loop.first and system is defined else '' }}"
    f"{{{{ m['content'] | trim + '<end_of_turn>\n' }}}}{{% endfor %}}{_GEMMA_ASK}"
)

MISTRAL_1 = (  # the first release, without system turns
    f"{{{{ bos_token }}}}{{% for m in messages %}}{_ALTERNATE}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    f"{{% elif m['role'] == 'assistant' %}}{{{{ m['content'] + eos_token }}}}{_REFUSE}"
)

MISTRAL_1_SYSTEM = (  # the later release of the same models
    f"{_SPLIT_SYSTEM}{{{{ bos_token }}}}{{% for m in turns %}}{_ALTERNATE}"
    "{% if m['role'] == 'user' %}"
    "{{ ' [INST] ' + (system + '\n\n' if loop.first and system is defined else '') + m['content'] + ' [/INST]' }}"
    f"{{% elif m['role'] == 'assistant' %}}{{{{ ' ' + m['content'] + eos_token }}}}{_REFUSE}"
)

MISTRAL_3 = (  # versions 2 and 3: the system text goes into the last turn of a conversation that asks for an answer
    f"{_SPLIT_SYSTEM}{{{{ bos_token }}}}{{% for m in turns %}}{_ALTERNATE}"
    "{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') + m['content'] + '[/INST]' }}"
    f"{{% elif m['role'] == 'assistant' %}}{{{{ ' ' + m['content'] | trim + eos_token }}}}{_REFUSE}"
)

QWEN_2_5 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
    "You are a helpful assistant.<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    f"{{% if m['role'] in ('system', 'user', 'assistant') %}}{_TURN}{_TOOL_IN_USER_TURN}{{% endif %}}{{% endfor %}}{_ASK}"
)

QWEN_3 = (  # the answer after the last question is shown with its thoughts, empty ones included
    "{% set ns = namespace(found=false, last=messages | length - 1) %}{% for m in messages[::-1] %}"
    "{% if not ns.found and m['role'] == 'user' %}{% set ns.found = true %}"
    "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    f"{{% if m['role'] in ('system', 'user') %}}{_TURN}{{% elif m['role'] == 'assistant' %}}"
    "{% set content, thoughts = m['content'], '' %}{% if '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thoughts) %}"
    "{{ '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    f"{{{{ '<|im_end|>\n' }}}}{_TOOL_IN_USER_TURN}{{% endif %}}{{% endfor %}}{_ASK}"
)

PHI_3 = (  # the end token stands behind a whole conversation, unless an answer is asked for
    "{% for m in messages %}{% if m['role'] in ('system', 'user', 'assistant') %}"
    "{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)

PHI_3_FIRST = (  # the first release: no system turns, and no generation prompt
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n<|assistant|>\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
)

SMOLLM_2 = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    f"{_TURN}{{% endfor %}}{_ASK}"
)

GPT_OSS = (  # a system turn becomes the developer's; the last answer ends otherwise than those before it
    "{{ '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: "
    "2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: medium\n\n# Valid channels: analysis, "
    "commentary, final. Channel must be included for every message.<|end|>' }}"
    f"{_SPLIT_SYSTEM}{{% if system %}}"
    "{{ '<|start|>developer<|message|># Instructions\n\n' + system + '\n\n<|end|>' }}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}{{ '<|start|>user<|message|>' + m['content'] + '<|end|>' }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m['role'] == 'tool' %}{{ raise_exception('no previous tool call') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

DEEPSEEK_R1 = (  # the last system text goes first
    "{% set ns = namespace(is_tool=false, is_first=true, system='') %}"
    "{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}{% endfor %}"
    "{{ bos_token + ns.system }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' + m['content'] }}"
    "{% set ns.is_tool = false %}{% else %}{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] }}{% endif %}"
    "{{ '<｜end▁of▁sentence｜>' }}{% elif m['role'] == 'tool' %}{% set ns.is_tool = true %}"
    "{{ '<｜tool▁outputs▁begin｜>' if ns.is_first else '\n' }}{% set ns.is_first = false %}"
    "{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}"
    "{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% elif add_generation_prompt %}"
    "{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "deepseek-r1": DEEPSEEK_R1,
    "gemma-2": GEMMA_2,
    "gemma-3": GEMMA_3,
    "gpt-oss": GPT_OSS,
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "llama-3.2": LLAMA_3_2,
    "mistral-1": MISTRAL_1,
    "mistral-1-system": MISTRAL_1_SYSTEM,
    "mistral-3": MISTRAL_3,
    "phi-3": PHI_3,
    "phi-3-first": PHI_3_FIRST,
    "qwen-2.5": QWEN_2_5,
    "qwen-3": QWEN_3,
    "smollm-2": SMOLLM_2,
}
