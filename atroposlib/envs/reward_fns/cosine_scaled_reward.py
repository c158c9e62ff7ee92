"""Score how near completions are to a reference text in meaning, by sentence embeddings. Needs torch."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import numpy as np

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction, one_each

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"

Embedder: TypeAlias = Callable[[list[str]], np.ndarray]
"""N texts -> [N, D]."""


@registry.register
class CosineScaledReward(RewardFunction):
    """1 - scale_factor * cosine distance, cut to [min_reward, max_reward]."""

    def __init__(
        self,
        model_name: str | None = None,
        scale_factor: float = 1.0,
        min_reward: float = -1.0,
        max_reward: float = 1.0,
        default_reward: float = 0.0,
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the settings; the model is loaded at the first use, once per name and process.

        Args:
            model_name: Hugging Face encoder; None: DEFAULT_MODEL.
            scale_factor: how fast the reward falls with the cosine distance (0 to 2).
            default_reward: of an empty completion, which has no direction to compare.
        """
        super().__init__(weight, name, **kwargs)
        self.model_name = model_name or DEFAULT_MODEL
        self.scale_factor = scale_factor
        self.min_reward = min_reward
        self.max_reward = max_reward
        self.default_reward = default_reward

    def compute(
        self, completions: Sequence[Completion], solution: Completion | list[Completion] | None = None, **kwargs: object
    ) -> list[float]:
        """A reward for each completion; `solution` is a reference, text or message, for all or one for each."""
        solutions = one_each(solution, completions, needed_by=self.name, keyword="solution")
        contents = [self.get_content(completion) for completion in completions]
        references = [self.get_content(reference) for reference in solutions]
        embed = load_embedder(self.model_name)
        pairs = zip(contents, embed(contents), embed(references), strict=True)
        return [self._reward(said, wanted) if text.strip() else self.default_reward for text, said, wanted in pairs]

    def _reward(self, said: np.ndarray, wanted: np.ndarray) -> float:
        similarity = float(said @ wanted / (np.linalg.norm(said) * np.linalg.norm(wanted)))
        return min(self.max_reward, max(self.min_reward, 1.0 - self.scale_factor * (1.0 - similarity)))


def cosine_scaled_reward(
    completions: Sequence[Completion], solution: Completion | list[Completion] | None = None, **kwargs: object
) -> list[float]:
    return CosineScaledReward().compute(completions, solution=solution, **kwargs)


@cache
def load_embedder(model_name: str) -> Embedder:
    """Mean-pooled embeddings of a Hugging Face encoder.

    Raises:
        ImportError: torch is not installed.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("sentence embeddings need torch: pip install 'atroposlib[trainer]'") from error
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(model_name), AutoModel.from_pretrained(model_name)

    def embed(texts: list[str]) -> np.ndarray:
        encoded = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**encoded)[0]  # [N, T, D]
        mask = encoded["attention_mask"].unsqueeze(-1).float()
        return ((states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)).numpy()

    return embed
