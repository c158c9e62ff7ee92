import pytest

from atroposlib.envs.reward_fns import CombinedReward, RewardFunction, registry
from atroposlib.envs.reward_fns.registry import LegacyFunctionWrapper, RewardRegistry
from atroposlib.errors import ConfigError, RequestFault, VerifierFault
from atroposlib.rollouts.failures import Unscored


class Length(RewardFunction):
    """As many points as characters."""

    def compute(self, completions, **kwargs):
        return [float(len(self.get_content(completion))) for completion in completions]


class Broken(RewardFunction):
    def __init__(self, answer, **kwargs):
        super().__init__(**kwargs)
        self.answer = answer

    def compute(self, completions, **kwargs):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Metrics:
    def __init__(self):
        self.logged = []

    def log(self, data):
        self.logged.append(data)


def test_a_call_weighs_what_compute_gives():
    length = Length(weight=0.5)
    assert length.compute(["ab", "c"]) == [2.0, 1.0]
    assert length(["ab", "c"]) == [1.0, 0.5]
    assert length.name == "length"
    assert Length(name="mine").name == "mine"


def test_a_reward_function_that_raises_is_a_verifier_fault_not_a_zero():
    with pytest.raises(VerifierFault, match="broken failed on a group of 2: KeyError: 'gold'"):
        Broken(KeyError("gold"))(["a", "b"])


def test_a_fault_keeps_its_class():
    with pytest.raises(RequestFault):
        Broken(RequestFault("prompt too long"))(["a"])


@pytest.mark.parametrize("answer", [[1.0], [float("nan"), float("inf")]])
def test_rewards_that_are_missing_or_all_not_finite_are_a_verifier_fault(answer):
    with pytest.raises(VerifierFault, match=r"gave .*(for 2 completions|one finite number each)"):
        Broken(answer)(["a", "b"])


class Picky(RewardFunction):
    """1.0 where the completion is its solution, but it raises or gives NaN on odd ones."""

    def compute(self, completions, solution=None, **kwargs):
        if "raise" in completions:
            raise ZeroDivisionError("odd")
        return [
            float("nan") if said == "nan" else float(said == right)
            for said, right in zip(completions, solution, strict=True)
        ]


@pytest.mark.parametrize(("odd", "reason"), [("raise", "ZeroDivisionError: odd"), ("nan", "picky gave nan")])
def test_a_completion_that_cannot_be_scored_costs_its_siblings_nothing(odd, reason):
    metrics = Metrics()
    reward = Picky(weight=2.0)
    reward.set_wandb_logger(metrics)
    first, unscored, last = reward(["a", odd, "c"], solution=["a", "b", "d"])
    assert (first, last) == (2.0, 0.0)
    assert isinstance(unscored, Unscored)
    assert reason in str(unscored.fault)
    assert metrics.logged[0]["reward/picky/mean_raw"] == 0.5


@pytest.mark.parametrize("normalization", ["none", "sum", "minmax"])
def test_a_sum_with_a_part_that_cannot_score_is_no_score(normalization):
    combined = CombinedReward([], normalization=normalization)
    combined.reward_functions = [Length(), Picky()]
    first, unscored, last = combined(["a", "raise", "bcd"], solution=["b", "b", "bcd"])
    assert first < last
    assert isinstance(unscored, Unscored)


@pytest.mark.parametrize(
    "use", [bool, lambda score: score > 0, lambda score: score == 1.0, lambda score: max(1.0, score)]
)
def test_no_score_ever_becomes_a_number(use):
    with pytest.raises(VerifierFault, match="no verdict"):
        use(1.0 - 0.5 * Unscored(VerifierFault("no verdict")))


def test_metrics_of_a_group_are_logged_under_the_name():
    metrics = Metrics()
    length = Length(weight=2.0)
    length.set_wandb_logger(metrics)
    length(["a", "bcd"])
    assert metrics.logged == [
        {
            "reward/length/mean_raw": 2.0,
            "reward/length/mean_weighted": 4.0,
            "reward/length/min": 1.0,
            "reward/length/max": 3.0,
        }
    ]


def test_a_subclass_without_super_init_still_works():
    class Bare(Length):
        def __init__(self):
            self.weight = 3.0

    assert Bare()(["a"]) == [3.0]


ASSISTANT = {"role": "assistant", "content": "yes"}
COMPLETIONS = {
    "text": ("yes", "yes"),
    "assistant message": (ASSISTANT, "yes"),
    "choice": ({"message": ASSISTANT}, "yes"),
    "conversation": ([{"role": "user", "content": "no"}, ASSISTANT, {**ASSISTANT, "content": "later"}], "yes"),
    "content parts": ({"role": "assistant", "content": [{"type": "text", "text": "yes"}]}, "yes"),
    "no content": ({"role": "assistant", "content": None}, ""),
    "user message": ({"role": "user", "content": "no"}, ""),
    "only user messages": ([{"role": "user", "content": "no"}], ""),
    "empty conversation": ([], ""),
}


@pytest.mark.parametrize(("completion", "content"), COMPLETIONS.values(), ids=COMPLETIONS)
def test_the_text_of_every_form_of_completion(completion, content):
    assert RewardFunction.get_content(completion) == content


@pytest.fixture
def names():
    return RewardRegistry()


def test_a_class_is_registered_under_its_name_without_reward(names):
    class TallReward(Length):
        pass

    assert names.register(TallReward) is TallReward
    assert names.list_registered() == ["tall"]
    assert isinstance(names.create("tall"), TallReward)


def test_a_class_can_be_registered_under_a_name_of_its_own(names):
    names.register(name="size")(Length)
    assert names.get("size") is Length


def test_only_reward_functions_can_be_registered(names):
    with pytest.raises(TypeError, match="is no RewardFunction"):
        names.register(dict)


def test_a_config_sets_parameters_over_defaults(names):
    names.register(Length)
    created = names.create({"type": "length", "weight": 2.0, "params": {"name": "size"}}, weight=9.0, name="other")
    assert (created.weight, created.name) == (2.0, "size")


def test_a_plain_function_is_wrapped(names):
    def shout(completions, mark="!", **kwargs):
        return [float(completion.count(mark)) for completion in completions]

    names.register_function("shout", shout)
    created = names.create({"type": "shout", "mark": "?", "weight": 2.0})
    assert created.name == "shout"
    assert created(["a?", "b!"]) == [2.0, 0.0]


def test_one_number_of_a_plain_function_holds_for_all():
    assert LegacyFunctionWrapper(lambda completions, **kwargs: 0.5)(["a", "b"]) == [0.5, 0.5]


FILES = {
    "accuracy": "AccuracyReward",
    "format": "FormatReward",
    "format_reward": "FormatReward",
    "r1": "R1Reward",
    "r1_reward": "R1Reward",
    "cosine_scaled": "CosineScaledReward",
    "crossword_format": "CrosswordFormatReward",
    "reasoning_steps": "ReasoningStepsReward",
    "repetition_penalty": "RepetitionPenaltyReward",
    "chandas_meter": "ChandasMeterReward",
    "cascading_r1_math": "LegacyFunctionWrapper",
    "cascading_r1_math_reward": "LegacyFunctionWrapper",
}


@pytest.mark.parametrize(("name", "class_name"), FILES.items())
def test_every_reward_function_of_the_package_is_found_by_name(name, class_name):
    assert type(registry.create(name)).__name__ == class_name


def test_an_unknown_name_says_what_is_known(names):
    with pytest.raises(ImportError, match="no reward function 'nonsense'"):
        names.get("nonsense")
    with pytest.raises(ImportError, match=r"\.\./secret"):
        names.get("../secret")


def test_everything_a_config_names_is_loaded():
    class Dataset:
        dataset_reward_funcs = ("format",)
        types = ({"reward_funcs": ["r1"]}, {})

    class Config:
        reward_functions = ("accuracy", {"type": "repetition_penalty", "weight": 0.1})
        datasets = (Dataset(),)

    expected = {"accuracy", "repetition_penalty", "format", "r1"}
    assert registry.load_required_functions(Config()) == expected


@pytest.fixture
def combine():
    """Combined rewards of two lengths with weights 1 and 3."""
    registry.register(name="testlength")(Length)
    rewards = ["testlength", {"type": "testlength", "weight": 3.0}]
    yield lambda **kwargs: CombinedReward(rewards, **kwargs)
    del registry._registry["testlength"]


COMBINED = {
    "weights of the parts count": ({}, [4.0, 12.0]),
    "divided by the weights": ({"normalization": "sum"}, [1.0, 3.0]),
    "scaled to one": ({"normalization": "minmax"}, [0.0, 1.0]),
    "with a weight of its own": ({"normalization": "minmax", "weight": 0.5}, [0.0, 0.5]),
}


@pytest.mark.parametrize(("options", "expected"), COMBINED.values(), ids=COMBINED)
def test_rewards_are_combined(combine, options, expected):
    combined = combine(**options)
    assert combined(["a", "bcd"]) == expected
    assert combined.name == "combined(length,length)"


def test_equal_rewards_have_no_range_to_be_scaled_to(combine):
    assert combine(normalization="minmax")(["a", "b"]) == [4.0, 4.0]


def test_a_failing_part_fails_the_whole():
    combined = CombinedReward([])
    combined.reward_functions = [Length(), Broken(OSError("disk"))]
    with pytest.raises(VerifierFault, match="broken failed"):
        combined(["a"])


def test_the_parts_log_their_metrics_too(combine):
    metrics = Metrics()
    combined = combine()
    combined.set_wandb_logger(metrics)
    combined(["a"])
    assert len(metrics.logged) == 3


def test_a_subclass_may_bring_its_own_parts():
    class Own(CombinedReward):
        def __init__(self):
            self.normalization = "sum"
            self.reward_functions = [Length(weight=2.0)]
            self.weight = 1.0

    assert Own()(["ab"]) == [2.0]


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ConfigError, match="'zscore'"):
        CombinedReward([], normalization="zscore")
