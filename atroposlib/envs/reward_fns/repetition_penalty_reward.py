"""A penalty for text that repeats itself: sentences, words, phrases, stutter, sentence beginnings."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction

COMPONENT_WEIGHTS = {
    "word_repetition": 0.3,
    "phrase_repetition": 0.4,
    "consecutive_repetition": 0.6,
    "beginning_repetition": 0.5,
}

# fmt: off
STOPWORDS = frozenset({
    "this", "that", "with", "from", "what", "when", "where", "which", "who", "whom", "whose", "will", "shall", "should",
    "would", "could", "have", "has", "had", "been", "being", "than", "then", "there", "these", "those", "their",
})
# fmt: on

SMALLEST_PENALTY = -0.1
PARAGRAPH_RANGE = 0.4
"""Distance by which repeated sentences can push the penalty below its base."""

PHRASE_LENGTHS = (3, 4, 5)


@registry.register
class RepetitionPenaltyReward(RewardFunction):
    """-1.0 (nothing but repetition) to 0.0 (none)."""

    def __init__(
        self,
        threshold: float = 0.05,
        min_words: int = 10,
        min_sentences: int = 2,
        short_text_penalty: float = -0.1,
        paragraph_repetition_base_penalty: float = -0.6,
        component_weights: Mapping[str, float] | None = None,
        stopwords: Collection[str] | None = None,
        weight: float = 1.0,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        """Keep the settings.

        Args:
            threshold: weighted repetition rate, 0 to 1, that is not yet penalised.
            min_words: shorter texts get `short_text_penalty`.
            min_sentences: and texts of fewer sentences.
            short_text_penalty: see above.
            paragraph_repetition_base_penalty: when a sentence of more than 3 words comes twice.
            component_weights: replaces single values of COMPONENT_WEIGHTS.
            stopwords: words that may repeat; None: STOPWORDS.
        """
        super().__init__(weight, name, **kwargs)
        self.threshold = threshold
        self.min_words = min_words
        self.min_sentences = min_sentences
        self.short_text_penalty = short_text_penalty
        self.paragraph_repetition_base_penalty = paragraph_repetition_base_penalty
        self.component_weights = {**COMPONENT_WEIGHTS, **(component_weights or {})}
        self.stopwords = frozenset(stopwords or STOPWORDS)

    def compute(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        """-1.0 to 0.0 for each completion."""
        return [self._penalty(self.get_content(completion)) for completion in completions]

    def _penalty(self, content: str) -> float:
        words = re.findall(r"\b\w+\b", content.lower())
        sentences = [sentence.strip() for sentence in re.split(r"[.!?]", content) if sentence.strip()]
        if len(words) < self.min_words or len(sentences) < self.min_sentences:
            return self.short_text_penalty
        repeated = _repeats(sentence for sentence in sentences if len(sentence.split()) > 3)
        if repeated:
            return self.paragraph_repetition_base_penalty - PARAGRAPH_RANGE * repeated / len(sentences)
        rates = self._rates(words, sentences)
        score = sum(self.component_weights[component] * rate for component, rate in rates.items())
        if score <= self.threshold:
            return 0.0
        excess = (score - self.threshold) / (1 - self.threshold)
        return min(SMALLEST_PENALTY, -min(1.0, excess))

    def _rates(self, words: list[str], sentences: list[str]) -> dict[str, float]:
        """Repetitions per word, or per sentence for the beginnings."""
        meaningful = Counter(word for word in words if len(word) > 3 and word not in self.stopwords)
        phrases = sum(
            size / PHRASE_LENGTHS[0] * _repeats(zip(*(words[i:] for i in range(size)), strict=False))
            for size in PHRASE_LENGTHS
        )
        stutter = sum(word == before and len(word) > 2 for before, word in pairwise(words))
        openings = [tuple(sentence.split()[:3]) for sentence in sentences]
        return {
            "word_repetition": sum(count - 1 for count in meaningful.values() if count > 2) / len(words),
            "phrase_repetition": phrases / len(words),
            "consecutive_repetition": stutter / len(words),
            "beginning_repetition": _repeats(opening for opening in openings if len(opening) == 3) / len(sentences),
        }


def repetition_penalty_reward(
    completions: Sequence[Completion], threshold: float = 0.05, **kwargs: object
) -> list[float]:
    return RepetitionPenaltyReward(threshold=threshold).compute(completions, **kwargs)


def _repeats(things: Iterable[object]) -> int:
    """Return how many of them came before."""
    counts = Counter(things)
    return counts.total() - len(counts)
