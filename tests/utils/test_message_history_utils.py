import pytest
from chat_tokenizers import CharTokenizer

from atroposlib.utils.message_history_utils import ensure_trajectory_token_limit, strip_thinking, truncate_thinking
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

TOKENIZER = CharTokenizer()

STRIPPED = {
    "block": ("a<think>b</think>c", "ac"),
    "only the first": ("<think>b</think>c<think>d</think>", "c<think>d</think>"),
    "unclosed": ("a<think>b", "a<think>b"),
    "closed before opened": ("a</think>b<think>c", "a</think>b<think>c"),
    "none": ("abc", "abc"),
}


@pytest.mark.parametrize(("text", "expected"), STRIPPED.values(), ids=STRIPPED)
def test_strip_thinking(text, expected):
    assert strip_thinking(text) == expected


TRUNCATED = {
    "fits": ("<think>abc</think>x", 3, "<think>\nabc\n</think>x"),
    "last paragraph": ("<think>long start\n\nend</think>x", 5, "<think>\n... end\n</think>x"),
    "token tail": ("<think>one\n\nlong ending</think>x", 6, "<think>\n... ending\n</think>x"),
    "nothing may stay": ("<think>abc</think>x", 0, "<think></think>x"),
    "blank": ("<think> \n </think>x", 5, "<think></think>x"),
    "unclosed": ("<think>abc", 1, "<think>abc"),
    "text around": ("hi <think>abc</think> x", 9, "hi <think>\nabc\n</think> x"),
}


@pytest.mark.parametrize(("text", "limit", "expected"), TRUNCATED.values(), ids=TRUNCATED)
def test_truncate_thinking(text, limit, expected):
    assert truncate_thinking(text, TOKENIZER, limit) == expected


def conversation(turns, last="bye"):
    middle = [{"role": role, "content": f"{role[0]}{i}"} for i in range(turns) for role in ("environment", "agent")]
    middle[-1] = {"role": "agent", "content": last}
    return [{"role": "system", "content": "sys"}, *middle]


def step(*conversations, **extra):
    tokenized = [tokenize_for_trainer(TOKENIZER, messages) for messages in conversations]
    return {
        "messages": list(conversations),
        "tokens": [alternative["tokens"] for alternative in tokenized],
        "masks": [alternative["masks"] for alternative in tokenized],
        "scores": [1.0] * len(conversations),
        "seed": 7,
        "parsed_actions": [0] * len(conversations),
        **extra,
    }


def test_a_step_that_fits_is_left_as_it_is():
    fitting = step(conversation(3))
    assert ensure_trajectory_token_limit([fitting], TOKENIZER, 10_000)[0] is fitting


def test_a_long_step_loses_its_oldest_pairs_in_every_alternative():
    long = step(conversation(4), conversation(4, last="other"))
    limit = len(tokenize_for_trainer(TOKENIZER, conversation(4, last="other"))["tokens"]) - 1
    [shortened] = ensure_trajectory_token_limit([long], TOKENIZER, limit)
    contents = [[message["content"] for message in messages] for messages in shortened["messages"]]
    assert contents == [
        ["sys", "e1", "a1", "e2", "a2", "e3", "bye"],
        ["sys", "e1", "a1", "e2", "a2", "e3", "other"],
    ]
    assert shortened["tokens"][0] == tokenize_for_trainer(TOKENIZER, shortened["messages"][0])["tokens"]
    assert max(map(len, shortened["tokens"])) <= limit
    assert shortened["seed"] == 7
    assert len(long["messages"][0]) == 9


def test_system_prompt_last_observation_and_last_reply_stay():
    shortest = tokenize_for_trainer(TOKENIZER, conversation(1))
    limit = len(shortest["tokens"])
    [shortened] = ensure_trajectory_token_limit([step(conversation(5))], TOKENIZER, limit)
    assert [message["content"] for message in shortened["messages"][0]] == ["sys", "e4", "bye"]
    assert ensure_trajectory_token_limit([step(conversation(5))], TOKENIZER, limit - 1) == []


def test_an_alternative_with_nothing_to_drop_stops_the_cutting():
    assert ensure_trajectory_token_limit([step(conversation(1), conversation(5))], TOKENIZER, 40) == []


def test_arrays_per_token_do_not_survive_a_retokenised_step():
    long = step(conversation(4), inference_logprobs=[[0.0]])
    [shortened] = ensure_trajectory_token_limit([long], TOKENIZER, len(long["tokens"][0]) - 1)
    assert shortened["inference_logprobs"] is None
    assert "advantages" not in shortened


def test_a_step_without_its_keys_is_left_out_with_a_warning(caplog):
    incomplete = step(conversation(2), seed=None)
    assert ensure_trajectory_token_limit([incomplete, step(conversation(1))], TOKENIZER, 1000) != []
    assert "step left out: index=0 missing=seed" in caplog.text
