"""Find a word of five letters in six guesses: after each, what of it is right is told letter by letter.

    python word_guess_env.py process --env.total_steps 20 --env.data_path_to_save_groups words.jsonl ...

The marks: + the letter stands there, ~ it stands elsewhere, - it is not in the word (or not once more).
"""

import random
from collections import Counter

from atroposlib.environments.multi_turn import MultiTurnConfig, MultiTurnEnv, Reply, Step, World, last_move
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

GUESSES, LETTERS = 6, 5
_WORDS = """
acorn adapt agent alarm album alert angle apple arena arrow aside attic audio award bacon badge baker basin beach
berry birch black blade blank blend block bloom board brain brave bread brick bride brief brown brush cabin cable
camel candy cargo chain chair chalk charm chess chest chief child choir civic claim clean clerk cliff clock cloth
cloud coach coast coral couch cover crane cream crowd crown curve dairy dance depth diary dozen draft dream dress
drink drive eagle early earth elbow entry error event fable faith fault feast fence fever field flame fleet flock
floor flour fluid focus force forge frame fresh front frost fruit ghost giant glass globe glove grain grape grass
green guard guest guide habit happy heart hedge hobby honey horse hotel house human humor image index inner issue
ivory jelly jewel joint judge juice knife label labor large laser lemon level light limit linen liver logic lunch
magic maple march medal mercy metal meter mixed model money month moral motor mount mouse movie music nerve night
noble noise north novel nurse ocean olive onion orbit order organ other paint panel paper party patch peace pearl
phase phone piano pilot pitch plain plane plant plate point pound power press price pride prime print prize proof
queen quick quiet quilt radio raise ranch range rapid ratio razor reply river roast robin robot rough round route
royal salad sauce scale scarf scene scent score sense shade shape share sharp sheep sheet shelf shell shift shirt
shore skill sleep slice slope smile smoke snake solid sound south space spark spice spoon sport spray squad staff
stage stair stamp steam steel stone storm story stove straw sugar sweet swing table taste theme tiger toast token
topic torch total tower track trade train trend trial tribe truck trust truth uncle union upper urban value vapor
vault video virus visit vital vivid voice wagon waist waste watch water whale wheat wheel white whole world wound
wrist write yacht young youth zebra
"""
WORDS = tuple(_WORDS.split())


class WordWorld(World):
    """One word; finding it earns 1."""

    def __init__(self, word: str) -> None:
        self.word, self.guessed = word, list[str]()

    async def begin(self) -> str:
        return (
            f"Find an English word of {LETTERS} letters in {GUESSES} guesses. After each every letter gets a mark: "
            "+ it stands there, ~ it stands elsewhere in the word, - it is not in the word or not once more. "
            "End with your guess on a line of its own."
        )

    async def step(self, reply: Reply) -> Step:
        guess = last_move(reply.text).lower()
        if len(guess) != LETTERS or not (guess.isascii() and guess.isalpha()) or guess in self.guessed:
            return Step(f"That is no new word of {LETTERS} letters. Guess again.", is_invalid=True)
        self.guessed.append(guess)
        is_found, left = guess == self.word, GUESSES - len(self.guessed)
        return Step(f"{guess} {marks(guess, self.word)}\n{left} guesses left.", is_found or not left, float(is_found))

    def gold(self) -> str:
        return self.word


class WordGuessEnv(MultiTurnEnv):
    """A word of five letters: score 1 where it is found in six guesses, else 0."""

    name = "word_guess"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config, engine = super().config_init()
        return MultiTurnConfig(**{**config.model_dump(exclude_unset=True), "max_turns": 2 * GUESSES}), engine

    def make(self, rng: random.Random, level: int) -> dict[str, str]:
        return {"word": rng.choice(WORDS)}

    async def open(self, item: dict[str, str]) -> WordWorld:
        return WordWorld(item["word"])


def marks(guess: str, word: str) -> str:
    """Return a mark for each letter; a letter is marked at most as often as the word has it.

    >>> marks("llama", "label")
    '+~~--'
    """
    left = Counter(have for have, said in zip(word, guess, strict=True) if have != said)
    signs = []
    for have, said in zip(word, guess, strict=True):
        is_elsewhere = have != said and left[said] > 0
        left[said] -= is_elsewhere
        signs.append("+" if have == said else "~" if is_elsewhere else "-")
    return "".join(signs)


if __name__ == "__main__":
    WordGuessEnv.cli()
