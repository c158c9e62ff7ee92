"""Score how well a Sanskrit poem in roman letters (IAST) keeps a metre.

A syllable is heavy (G, guru) with a long vowel, or when anusvara, visarga or two consonants follow; otherwise it is
light (L, laghu). The last syllable of a pada may be either.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import cycle
from statistics import fmean

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction
from atroposlib.errors import ConfigError

# Padas of each metre, repeated in turn; "." fits both weights.
METERS = {
    "anustubh": ("....LGG.", "....LGL."),
    "gayatri": ("....LGL.",),
    "tristubh": (".......GLG.",),
    "jagati": (".......GLGL.",),
    "indravajra": ("GGLGGLLGLG.",),
    "upendravajra": ("LGLGGLLGLG.",),
    "vasantatilaka": ("GGLGLLLGLLGLG.",),
    "malini": ("LLLLLLGGGLGGLG.",),
    "mandakranta": ("GGGGLLLLLGGLGGLG.",),
    "sikharini": ("LGGGGGLLLLLGGLLL.",),
    "sardulavikridita": ("GGGLLGLGLLLGGGLGGL.",),
}

# One letter for one sound. Letters that are the same in IAST and SLP1 are left out.
# fmt: off
IAST_TO_SLP1 = {
    "kh": "K", "gh": "G", "ch": "C", "jh": "J", "ṭh": "W", "ḍh": "Q", "th": "T", "dh": "D", "ph": "P", "bh": "B",
    "ai": "E", "au": "O", "ā": "A", "ī": "I", "ū": "U", "ṛ": "f", "ṝ": "F", "ḷ": "x", "ḹ": "X",
    "ṅ": "N", "ñ": "Y", "ṭ": "w", "ḍ": "q", "ṇ": "R", "ś": "S", "ṣ": "z", "ṃ": "M", "ṁ": "M", "ḥ": "H",
}
# fmt: on

_LONGEST_FIRST = re.compile("|".join(sorted(IAST_TO_SLP1, key=len, reverse=True)))
_SYLLABLE = re.compile(r"(?P<vowel>[aiufxAIUFXeEoO])(?P<rest>[^aiufxAIUFXeEoO]*)")
_LONG_VOWELS = frozenset("AIUFXeEoO")
_LINE_END = re.compile(r"[\n|।॥]+")


@registry.register
class ChandasMeterReward(RewardFunction):
    """0.0 to 1.0: the share of syllables that fit the metre, averaged over the padas. 0.0 without any syllable."""

    def __init__(self, meter: str = "tristubh", weight: float = 1.0, name: str | None = None, **kwargs: object) -> None:
        """Keep the metre, a name of METERS, with or without diacritics; ConfigError for an unknown one."""
        super().__init__(weight, name, **kwargs)
        self.meter = _without_diacritics(meter)
        if self.meter not in METERS:
            raise ConfigError(f"meter is {meter!r}; known metres: {', '.join(METERS)}")

    def compute(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        """0.0 to 1.0 for each completion; padas end with a line or a danda, and two may share a line."""
        return [self._score_text(self.get_content(completion)) for completion in completions]

    def _score_text(self, text: str) -> float:
        patterns = METERS[self.meter]
        length = len(patterns[0])
        lines = [weights for weights in map(syllable_weights, _LINE_END.split(text)) if weights]
        padas = [
            pada for line in lines for pada in ([line[:length], line[length:]] if len(line) == 2 * length else [line])
        ]
        return fmean(map(_fit, padas, cycle(patterns))) if padas else 0.0


def syllable_weights(line: str) -> str:
    """A line of IAST as L and G.

    >>> syllable_weights("dharmakṣetre kurukṣetre")
    'GGGGLGGG'
    """
    sounds = re.sub(r"[^a-zA-Z]", "", iast_to_slp1(line))
    return "".join(
        "G"
        if syllable["vowel"] in _LONG_VOWELS or syllable["rest"][:1] in ("M", "H") or len(syllable["rest"]) > 1
        else "L"
        for syllable in _SYLLABLE.finditer(sounds)
    )


def iast_to_slp1(text: str) -> str:
    """Romanised Sanskrit in IAST, composed or not, as SLP1.

    >>> iast_to_slp1("dharmakṣetre")
    'Darmakzetre'
    """
    composed = unicodedata.normalize("NFC", text).lower()
    return _LONGEST_FIRST.sub(lambda match: IAST_TO_SLP1[match[0]], composed)


def _fit(weights: str, pattern: str) -> float:
    matching = sum(wanted in (".", found) for found, wanted in zip(weights, pattern, strict=False))
    return matching / max(len(weights), len(pattern))


def _without_diacritics(name: str) -> str:
    return "".join(char for char in unicodedata.normalize("NFD", name.lower()) if not unicodedata.combining(char))
