"""Tokenizers of known behaviour: one id per character, `<eos>` after each turn."""

from collections.abc import Sequence

EOS = 3
TURN_START, TURN_END = "[", "]"


class CharTokenizer:
    """Renders `[role:content]`; ids are code points, and TURN_END becomes EOS."""

    eos_token_id = EOS

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [EOS if char == TURN_END else ord(char) for char in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(TURN_END if i == EOS else chr(i) for i in ids if not (skip_special_tokens and i == EOS))

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False):
        text = "".join(f"[{message['role']}:{message['content']}]" for message in conversation)
        text += "[assistant:" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


class BatchEncodingTokenizer(CharTokenizer):
    """Answers like transformers 5: a mapping unless `return_dict=False` is given."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, return_dict=True):
        ids = super().apply_chat_template(conversation, tokenize, add_generation_prompt)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict and tokenize else ids


class ForgetfulTokenizer(CharTokenizer):
    """Drops earlier assistant turns from the rendering, as templates of reasoning models do with their thoughts."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False):
        kept = [m for i, m in enumerate(conversation) if m["role"] != "assistant" or i == len(conversation) - 1]
        return super().apply_chat_template(kept, tokenize, add_generation_prompt)
