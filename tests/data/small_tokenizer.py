"""A byte-level BPE tokenizer made on the spot, and chat templates of the families in use."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|start_header|>' + m['role'] + '<|end_header|>\n\n' "
    "+ m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
R1 = (
    "{{ '<|begin|>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% set content = m['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + content + '<|eot|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)
R1_OPENED = R1.replace("{{ '<|Assistant|>' }}", "{{ '<|Assistant|><think>\n' }}")
QWEN3 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set parts = m['content'].split('</think>') %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip() "
    "if parts | length > 1 else '') + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].strip() + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<|begin|>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + '<|eot|>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<|begin|>' }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|turn|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim"
    " + '<|end_turn|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>model\n' }}{% endif %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "Llama 3": LLAMA3,
    "R1": R1,
    "R1 with opened think": R1_OPENED,
    "Qwen 3": QWEN3,
    "Mistral": MISTRAL,
    "Gemma": GEMMA,
}
SPECIALS = [
    *("<|pad|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>"),
    *("<|User|>", "<|Assistant|>", "<|turn|>", "<|end_turn|>"),
]


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """A Hugging Face tokenizer folder with `template`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the answer of the question is two plus three equals five <think> step by step </think>"] * 20
    tokenizer.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIALS,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
