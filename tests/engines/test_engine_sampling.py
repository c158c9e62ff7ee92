"""Drawing tokens: the right distribution, the right log-probability, the right refusals."""

import numpy as np
import pytest

from atroposlib.errors import RequestFault
from atroposlib_engine.sampling import Draw, Sampler, SamplingParams, parse_sampling, prompt_logprobs, top_logprobs

VOCABULARY = 1000
RANDOM = np.random.default_rng(7)
LOGITS = RANDOM.normal(0, 3, (4, VOCABULARY)).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def draw_many(params: SamplingParams, logits: np.ndarray = LOGITS[0], count: int = 4000) -> list[int]:
    sampler = Sampler(1, VOCABULARY)
    uniforms = (np.arange(count) + 0.5) / count
    return [sampler.draw(logits[None, :], [Draw(params, float(u), ())])[0][0] for u in uniforms]


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.5])
def test_evenly_spread_uniforms_draw_every_token_by_its_probability(temperature):
    counts = np.bincount(draw_many(SamplingParams(temperature=temperature)), minlength=VOCABULARY)
    expected = np.exp(log_softmax(LOGITS[0] / temperature)) * 4000
    assert np.abs(counts - expected).max() <= 1.01  # each token owns one interval of the unit line


def test_uniforms_at_both_ends_draw_a_possible_token():
    logits = np.full((1, VOCABULARY), -np.inf, np.float32)
    logits[0, [3, 990]] = 0.0
    sampler = Sampler(1, VOCABULARY)
    ends = [sampler.draw(logits, [Draw(SamplingParams(), u, ())])[0][0] for u in (0.0, 1 - 2**-53)]
    assert ends == [3, 990]


def test_logprob_is_of_the_distribution_after_temperature_and_before_top_p():
    params = [
        SamplingParams(temperature=1.0), SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=2.0, top_k=5, min_p=0.1),
    ]  # fmt: skip
    draws = [Draw(one, 0.4, ()) for one in params]
    tokens, values, _ = Sampler(4, VOCABULARY).draw(LOGITS, draws)
    expected = [log_softmax(LOGITS[i] / one.temperature)[tokens[i]] for i, one in enumerate(params)]
    assert values == pytest.approx(expected, abs=1e-5)


def test_greedy_takes_the_likeliest_and_reports_temperature_one():
    tokens, values, _ = Sampler(1, VOCABULARY).draw(LOGITS[:1], [Draw(SamplingParams(temperature=0), 0.99, ())])
    assert tokens == [int(LOGITS[0].argmax())]
    assert values[0] == pytest.approx(log_softmax(LOGITS[0]).max(), abs=1e-5)


def test_top_k_leaves_the_k_likeliest():
    best = set(np.argsort(-LOGITS[0])[:3].tolist())
    assert set(draw_many(SamplingParams(top_k=3))) == best


def test_top_p_leaves_the_smallest_set_that_reaches_p():
    probabilities = np.sort(np.exp(log_softmax(LOGITS[0])))[::-1]
    size = int(np.searchsorted(probabilities.cumsum(), 0.5)) + 1
    assert set(draw_many(SamplingParams(top_p=0.5))) == set(np.argsort(-LOGITS[0])[:size].tolist())


def test_min_p_leaves_those_near_the_likeliest():
    probabilities = np.exp(log_softmax(LOGITS[0]))
    kept = set(np.flatnonzero(probabilities >= 0.2 * probabilities.max()).tolist())
    assert set(draw_many(SamplingParams(min_p=0.2))) == kept


def test_rows_with_different_parameters_do_not_touch_each_other_or_the_logits():
    before = LOGITS.copy()
    biased = SamplingParams(logit_bias={"5": 100.0})
    draws = [Draw(SamplingParams(), 0.3, ()), Draw(biased, 0.3, ()), Draw(SamplingParams(top_k=2), 0.3, ())]
    together, _, _ = Sampler(4, VOCABULARY).draw(LOGITS[:3], draws)
    alone = [Sampler(1, VOCABULARY).draw(LOGITS[i : i + 1], [draws[i]])[0][0] for i in range(3)]
    assert together == alone
    assert together[1] == 5
    assert (before == LOGITS).all()


PENALTIES = {
    "frequency": (SamplingParams(frequency_penalty=0.5), -1.0),
    "presence": (SamplingParams(presence_penalty=0.5), -0.5),
    "repetition": (SamplingParams(repetition_penalty=2.0), None),
}


@pytest.mark.parametrize(("params", "change"), PENALTIES.values(), ids=PENALTIES)
def test_penalties_change_the_logits_of_generated_tokens(params, change):
    token = int(LOGITS[0].argmax())  # its logit is positive
    shifted = LOGITS[0].copy()
    shifted[token] = shifted[token] / 2 if change is None else shifted[token] + change
    tokens, values, _ = Sampler(1, VOCABULARY).draw(LOGITS[:1], [Draw(params, 0.5, [token, token])])
    assert values[0] == pytest.approx(log_softmax(shifted)[tokens[0]], abs=1e-5)


def test_end_tokens_cannot_be_drawn_below_min_new_tokens():
    end = int(LOGITS[0].argmax())
    params = SamplingParams(temperature=0, min_new_tokens=2)
    tokens = [
        Sampler(1, VOCABULARY).draw(LOGITS[:1], [Draw(params, 0.5, generated, frozenset({end}))])[0][0]
        for generated in ([7], [7, 7])
    ]
    assert tokens[0] != end
    assert tokens[1] == end


def test_top_logprobs_are_sorted_and_exact():
    _, _, normalisers = Sampler(1, VOCABULARY).draw(LOGITS[:1], [Draw(SamplingParams(temperature=0.7), 0.5, ())])
    exact = log_softmax(LOGITS[0] / 0.7)
    best = top_logprobs(LOGITS[0], 0.7, float(normalisers[0]), 5)
    assert [token for _, token in best] == np.argsort(-exact)[:5].tolist()
    assert [value for value, _ in best] == pytest.approx(np.sort(exact)[::-1][:5].tolist(), abs=1e-5)


def test_prompt_logprobs_score_the_following_token():
    values, _ = prompt_logprobs(LOGITS, [1, 2, 3, 4])
    assert values.tolist() == pytest.approx([log_softmax(LOGITS[i])[i + 1] for i in range(4)], abs=1e-5)


REFUSED = {
    "misspelt": ({"temprature": 1}, "did you mean 'temperature'"),
    "unknown": ({"zzzz": 1}, "unknown key 'zzzz'"),
    "negative temperature": ({"temperature": -1}, "temperature must be non-negative, got -1."),
    "not a number": ({"temperature": "hot"}, "temperature must be non-negative, got hot."),
    "nan": ({"temperature": float("nan")}, "temperature must be non-negative"),
    "top_p 0": ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
    "top_k 0": ({"top_k": 0}, "top_k must be -1 (disable) or at least 1"),
    "half a token": ({"max_new_tokens": 1.5}, "max_new_tokens must be at least 1, got 1.5."),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    "n 0": ({"n": 0}, "n must be at least 1"),
    "true is no number": ({"n": True}, "n must be at least 1"),
    "more than fits anywhere": ({"n": 1e308}, "n must be at least 1 and at most 4096"),
    "stop of numbers": ({"stop": [1]}, "stop must be"),
    "grammar": ({"json_schema": "{}"}, "not supported by the embedded engine"),
    "no object": ([1], "sampling_params must be an object"),
    "bias of a raised number": ({"logit_bias": {"²": 1}}, "logit_bias must map token ids"),
    "bias of words": ({"logit_bias": {"a": 1}}, "logit_bias must map token ids"),
}


@pytest.mark.parametrize(("raw", "sentence"), REFUSED.values(), ids=REFUSED)
def test_parameters_the_engine_would_not_honour_are_refused(raw, sentence):
    with pytest.raises(RequestFault) as refusal:
        parse_sampling(raw)
    assert sentence in str(refusal.value)


def test_nulls_and_absent_parameters_are_defaults():
    assert parse_sampling({"temperature": None, "stop": None}) == parse_sampling(None) == SamplingParams()


def test_seed_is_taken_under_both_names():
    assert parse_sampling({"seed": 5}) == parse_sampling({"sampling_seed": 5}) == SamplingParams(sampling_seed=5)


def test_logprobs_stay_exact_at_a_low_temperature():
    logits = LOGITS[:1] + 30
    tokens, values, _ = Sampler(1, VOCABULARY).draw(logits, [Draw(SamplingParams(temperature=1e-4), 0.5, ())])
    exact = log_softmax(logits[0].astype(np.float64) / 1e-4)[tokens[0]]
    assert values[0] == pytest.approx(exact, abs=1e-3)


def test_whole_numbers_written_as_floats_are_whole_numbers():
    assert parse_sampling({"top_k": 5.0, "n": 2.0}) == SamplingParams(top_k=5, n=2)
    assert isinstance(parse_sampling({"top_k": 5.0}).top_k, int)
