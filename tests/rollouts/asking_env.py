"""An environment that asks an SGLang-like engine for groups of answers to numbers. A script for benches."""

from typing import Any

from fakes import FakeTokenizer

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class AskingConfig(BaseEnvConfig):
    plain_tokenizer: bool = False  # one of transformers instead of the fake one


class AskingEnv(BaseEnv):
    name = "asking"
    env_config_cls = AskingConfig

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        server = APIServerConfig(model_name="fake", server_type="sglang", num_max_requests_at_once=10_000)
        server.base_url = "http://127.0.0.1:9001/v1"
        return AskingConfig(use_wandb=False), [server]

    def load_tokenizer(self) -> Any:
        return bytes_tokenizer() if self.config.plain_tokenizer else FakeTokenizer()

    async def setup(self) -> None:
        pass

    async def get_item(self, index: int) -> dict[str, int]:
        return {"number": index}

    async def collect_trajectories(self, item: dict[str, int]) -> tuple[Any, list[Any]]:
        size = self.config.group_size
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(prompt=str(item["number"]), n=size, max_tokens=8)
            nodes = managed.get_state()["nodes"]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [float(i % 2) for i in range(size)],
        }, []


def bytes_tokenizer() -> Any:
    """A Hugging Face tokenizer with one token for each byte, and an end token 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*letters, "(pad)"])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


if __name__ == "__main__":
    AskingEnv.cli()
