"""Our own bootcamps: small problems with one right answer, which a small model sometimes gets right.

Each needs three things: `case_generator`, `prompt_func`, and `solution`, the right answer as text. Replies that show
the form (`demonstration`) and the score follow from those.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping

from atroposlib.environments.intern_bootcamp.bootcamp import Grading, grade, tagged
from atroposlib.environments.intern_bootcamp.words import WORDS
from atroposlib.type_definitions import Json, JsonObject


class OwnBootcamp(ABC):
    """A bootcamp whose answer is a short text in answer tags."""

    def __init__(self, *, rng: random.Random | None = None) -> None:
        """`rng` decides which problems come."""
        self.rng = rng or random.Random()

    @abstractmethod
    def case_generator(self) -> JsonObject: ...

    @abstractmethod
    def prompt_func(self, identity: Mapping[str, Json]) -> str: ...

    @abstractmethod
    def solution(self, identity: Mapping[str, Json]) -> str: ...

    def demonstration(self, identity: Mapping[str, Json]) -> str:
        """A right reply, as short as it can be."""
        return tagged(self.solution(identity))

    def verify_score(
        self,
        output: str,
        identity: Mapping[str, Json],
        format_score: float = 0.0,
        short_penalty: bool = True,
        short_threshold: int = 100,
        format_penalty: bool = True,
    ) -> float:
        """1.0 for the right answer, `format_score` for another one in tags, 0.0 without tags; see `Grading`."""
        solution = self.solution(identity)
        grading = Grading(
            format_score=format_score,
            short_penalty=short_penalty,
            short_threshold=short_threshold,
            format_penalty=format_penalty,
        )
        return grade(output, lambda answer: float(answer == solution), grading)


class Addition(OwnBootcamp):
    """Sums of two positive numbers."""

    def __init__(self, *, largest: int = 9, rng: random.Random | None = None) -> None:
        """`largest`: both numbers lie between 1 and this."""
        super().__init__(rng=rng)
        self.largest = largest

    def case_generator(self) -> JsonObject:
        return {"left": self.rng.randint(1, self.largest), "right": self.rng.randint(1, self.largest)}

    def prompt_func(self, identity: Mapping[str, Json]) -> str:
        return f"What is {identity['left']} + {identity['right']}?"

    def solution(self, identity: Mapping[str, Json]) -> str:
        return str(identity["left"] + identity["right"])

    def demonstration(self, identity: Mapping[str, Json]) -> str:
        """With the equation before the answer: a small model is right far more often when it writes that first."""
        solution = self.solution(identity)
        return f"{identity['left']} + {identity['right']} = {solution}. {tagged(solution)}"


class LargerOfTwo(OwnBootcamp):
    """Which of two different numbers is larger."""

    def __init__(self, *, digits: int = 2, rng: random.Random | None = None) -> None:
        """`digits`: of both numbers."""
        super().__init__(rng=rng)
        self.range = range(10 ** (digits - 1), 10**digits)

    def case_generator(self) -> JsonObject:
        left, right = self.rng.sample(self.range, 2)
        return {"left": left, "right": right}

    def prompt_func(self, identity: Mapping[str, Json]) -> str:
        return f"Which number is larger, {identity['left']} or {identity['right']}?"

    def solution(self, identity: Mapping[str, Json]) -> str:
        return str(max(identity["left"], identity["right"]))


class WordBootcamp(OwnBootcamp):
    """Problems about one English word."""

    def __init__(self, *, longest: int = 6, rng: random.Random | None = None) -> None:
        """`longest`: letters of the longest word used, at least 3."""
        super().__init__(rng=rng)
        self.words = [word for word in WORDS if len(word) <= longest]

    def case_generator(self) -> JsonObject:
        return {"word": self.rng.choice(self.words)}


class FirstLetter(WordBootcamp):
    """The first letter of a word."""

    def prompt_func(self, identity: Mapping[str, Json]) -> str:
        return f'What is the first letter of the word "{identity["word"]}"?'

    def solution(self, identity: Mapping[str, Json]) -> str:
        return identity["word"][0]


class Capitals(WordBootcamp):
    """A word in capital letters."""

    def __init__(self, *, longest: int = 4, rng: random.Random | None = None) -> None:
        super().__init__(longest=longest, rng=rng)

    def prompt_func(self, identity: Mapping[str, Json]) -> str:
        return f'Write the word "{identity["word"]}" in capital letters.'

    def solution(self, identity: Mapping[str, Json]) -> str:
        return identity["word"].upper()


class LetterCount(WordBootcamp):
    """Count the letters of a word."""

    def prompt_func(self, identity: Mapping[str, Json]) -> str:
        return f'How many letters does the word "{identity["word"]}" have?'

    def solution(self, identity: Mapping[str, Json]) -> str:
        return str(len(identity["word"]))


class Sorting(OwnBootcamp):
    """Different one-digit numbers in ascending order."""

    def __init__(self, *, count: int = 3, rng: random.Random | None = None) -> None:
        """`count`: how many numbers, 2 to 9."""
        super().__init__(rng=rng)
        self.count = count

    def case_generator(self) -> JsonObject:
        return {"numbers": self.rng.sample(range(1, 10), self.count)}

    def prompt_func(self, identity: Mapping[str, Json]) -> str:
        return f"Sort these numbers: {', '.join(map(str, identity['numbers']))}"

    def solution(self, identity: Mapping[str, Json]) -> str:
        return ", ".join(map(str, sorted(identity["numbers"])))


OWN_BOOTCAMPS: dict[str, type[OwnBootcamp]] = {
    "addition": Addition,
    "larger_of_two": LargerOfTwo,
    "first_letter": FirstLetter,
    "capitals": Capitals,
    "letter_count": LetterCount,
    "sorting": Sorting,
}
