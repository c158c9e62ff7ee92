"""Multiple choice with thinking: MMLU, MMLU-Pro, ARC, OpenBookQA and any other set of questions with choices.

python environments/mcqa_thinking_env.py process --env.dataset my_questions.jsonl
"""

from pydantic import Field

from atroposlib.environments.choices import LETTERS, Choice, chosen, listed, shuffled, to_choice
from atroposlib.environments.rows import Row
from atroposlib.environments.single_turn import THINK, RowsConfig, RowsEnv
from atroposlib.type_definitions import JsonObject


class MCQAConfig(RowsConfig):
    """Where the questions come from."""

    dataset: str | None = Field(
        default="cais/mmlu",
        description="A .jsonl or .parquet file with question, choices and answer (an index or a letter), in the form "
        "of any of the known sets; or a name on the model hub, which needs the package datasets.",
    )
    dataset_config: str | None = Field(default="all", description="hub: name of the configuration.")
    train_split: str = Field(default="auxiliary_train", description="hub: which split is trained on.")
    shuffle_choices: bool = Field(default=True, description="Ask with the choices in an order that depends on seed.")
    max_token_length: int = Field(default=4096, description="Tokens of one answer.")


class MCQAThinkingEnv(RowsEnv):
    """Score 1.0 for the letter, or the text, of the right choice after the thinking, else 0.0."""

    name = "mcqa_thinking"
    env_config_cls = MCQAConfig
    config: MCQAConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    guessing = 0.25  # of four choices
    system = THINK + 'say "The best answer is: X", where X is the letter of the right choice.'
    wanted = 'an object like {"question": "...", "choices": ["...", "..."], "answer": 0}'

    @classmethod
    def sample_rows(cls) -> list[JsonObject]:
        return [
            {"question": f"Which is {n} doubled?", "choices": [f"{3 * n}", f"{2 * n}", f"{n + 1}", f"{n}"], "answer": 1}
            for n in range(5, 85)
        ]

    def to_item(self, row: Row) -> Choice:  # pyright: ignore[reportIncompatibleMethodOverride]
        item = to_choice(row)
        return shuffled(item, str(self.config.seed)) if self.config.shuffle_choices else item

    def question(self, item: Choice) -> str:
        return f"{item['question']}\n\n{listed(item['choices'])}"

    def grade(self, said: str, item: Choice) -> float:
        return float(chosen(said, item["choices"]) == item["gold"])

    def gold(self, item: Choice) -> str:
        return f"The best answer is: {LETTERS[item['gold']]}"

    def other_spelling(self, item: Choice) -> str:
        return f"**({LETTERS[item['gold']]})**"

    def answer_of(self, said: str, item: Choice) -> str:
        return LETTERS[item["gold"]]

    def right_answers(self, item: Choice) -> int:
        return 1


if __name__ == "__main__":
    MCQAThinkingEnv.cli()
