"""The parts of PARENT_SCALE against worked examples, and the whole against what it must achieve."""

import numpy as np
import pytest

pytest.importorskip("scipy")

from atroposlib.environments.causal.design import (
    Effect,
    averaged,
    do_effect,
    expected_improvement,
    exploration_set,
    gaussian_process,
)
from atroposlib.environments.causal.expert import Expert, ExpertConfig
from atroposlib.environments.causal.posterior import (
    FourierFeatures,
    LinearFeatures,
    ParentPosterior,
    student_log_density,
)
from atroposlib.environments.causal.prior import (
    benjamini_yekutieli,
    bootstrap_prior,
    candidates,
    paired_p_values,
    robust_scores,
    shares,
    smoothed,
)
from atroposlib.environments.causal.problem import ProblemConfig, expected_metrics, jaccard, make_problem
from atroposlib.environments.causal.scm import (
    DIFFICULTIES,
    GRAPHS,
    Mechanism,
    Scm,
    World,
    data_plan,
    draw_scm,
    make_scm,
)
from atroposlib.environments.causal.search import Sums, climb, interventional_evidence
from atroposlib.errors import ConfigError

CHAIN = Scm(
    (
        Mechanism(noise=1.0),
        Mechanism(parents=(0,), coef=(2.0,), noise=0.0),
        Mechanism(parents=(1,), coef=(-1.5,), intercept=1.0, noise=0.0),
    ),
    target=2,
)


def close(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)


# the causal model


def test_an_intervention_cuts_a_variable_from_its_causes():
    untouched = CHAIN.sample(50, np.random.default_rng(0))
    rows = CHAIN.sample(50, np.random.default_rng(0), do=(1, 2.0))
    close(rows[:, 2], -2.0)
    close(rows[:, 1], 2.0)
    close(rows[:, 0], untouched[:, 0])
    close(CHAIN.target_mean(1, [2.0, 0.0]), [-2.0, 1.0])


def test_interventions_on_the_target_are_refused():
    with pytest.raises(ConfigError, match="X2 is the target"):
        CHAIN.sample(1, np.random.default_rng(0), do=(2, 0.0))


WRONG = {
    "a function": ({"mechanisms": [lambda x: x], "target": "X0", "graph_type": "own"}, "a mechanism is data"),
    "a cycle": (
        {
            "mechanisms": [{"parents": [1], "coef": [1.0]}, {"parents": [0], "coef": [1.0]}],
            "target": "X0",
            "graph_type": "own",
        },
        "cycle",
    ),
    "no such parent": (
        {"mechanisms": [{"parents": [3], "coef": [1.0]}], "target": "X0", "graph_type": "own"},
        "from 0",
    ),
    "a coefficient too few": (
        {"mechanisms": [{"parents": [0], "coef": []}], "target": "X0", "graph_type": "x"},
        "one finite",
    ),
}


@pytest.mark.parametrize(("said", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_no_model_is_refused_with_a_sentence(said, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Scm.from_json(said)


@pytest.mark.parametrize("graph", GRAPHS)
def test_models_travel_as_data_and_a_target_has_parents(graph):
    model = make_scm(np.random.default_rng(3), graph=graph, size=7, mechanism="mixed")
    assert Scm.from_json(model.as_json()) == model
    assert model.parents
    coefficients = [abs(value) for each in model.mechanisms for value in each.coef]
    assert len(set(coefficients)) == len(coefficients)
    assert min(coefficients) >= 0.5
    assert max(coefficients) <= 2.0


@pytest.mark.parametrize("level", DIFFICULTIES)
def test_a_level_draws_the_same_model_for_the_same_seed_and_targets_anywhere(level):
    models = [draw_scm(np.random.default_rng(seed), level) for seed in range(30)]
    assert models == [draw_scm(np.random.default_rng(seed), level) for seed in range(30)]
    sizes, graphs = DIFFICULTIES[level]
    assert {model.size for model in models} <= set(sizes)
    assert {model.graph for model in models} == set(graphs)
    assert len({model.target for model in models}) > 2


def test_the_number_of_rows_follows_from_the_number_of_variables():
    assert data_plan(3) == (100, 85, 15, 5)
    assert data_plan(8) == (300, 255, 45, 6)
    assert data_plan(20) == (500, 425, 75, 15)


# the prior


def test_doubly_robust_scores():
    f, muted = np.array([1.0, -1, 2, 0]), np.array([0.5, -0.5, 1, 0])
    y, a = np.array([1.1, -0.8, 2.2, -0.1]), np.column_stack([f, muted])
    z = robust_scores(y, a, a)
    close(z, [[1.2, 0.85], [0.6, 0.55], [4.8, 3.4], [0, 0]])
    close(paired_p_values(z), [0.261299])


def test_equal_columns_have_p_value_1():
    close(paired_p_values(np.ones((5, 3))), [1.0, 1.0])


def test_p_values_are_adjusted_for_their_number():
    adjusted = benjamini_yekutieli(np.array([0.001, 0.02, 0.04, 0.5]))
    close(adjusted, [0.008333, 0.083333, 0.111111, 1.0])
    assert (adjusted < 0.05).tolist() == [True, False, False, False]
    close(benjamini_yekutieli(np.array([0.5, 0.04, 0.001, 0.02])), adjusted[[3, 2, 0, 1]])


def test_the_prior_is_the_share_of_runs_and_leaves_no_candidate_out():
    seen = shares([(0,)] * 7 + [(0, 2)] * 2 + [()])
    assert seen == {(0,): 0.7, (0, 2): 0.2, (): 0.1}
    prior = smoothed(seen, candidates(seen, 10))
    assert sum(prior.values()) == pytest.approx(1)
    assert {(), (3,), (0, 9), (2,), (0, 1, 2)} <= prior.keys()
    assert (1, 3) not in prior
    assert (1, 3, 4) in candidates(seen, 8)
    assert prior[(0,)] == pytest.approx(0.95 * 0.7 + 0.05 / len(prior))
    thin = smoothed(seen, candidates(seen, 10), per_parent=0.1)
    assert thin[(0, 9)] / thin[(9,)] == pytest.approx(0.1)


@pytest.mark.parametrize("regressor", ["ridge", "rff_ridge"])
def test_direct_predictors_are_selected(regressor):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((150, 4))
    y = 1.2 * x[:, 0] - x[:, 2] + 0.3 * rng.standard_normal(150)
    prior = bootstrap_prior(x, (y - y.mean()) / y.std(), rng, bootstraps=5, regressor=regressor)
    assert {0, 2} <= set(max(prior, key=lambda each: prior[each]))


# the posterior

PHI, Y = np.array([[0.0], [1.0], [2.0]]), np.array([0.0, 1.0, 2.0])


def test_bayesian_regression_predicts_before_it_learns():
    posterior = ParentPosterior({(0,): 1.0}, PHI, Y, noise=1.0)
    close(posterior.covariance[0], [[0.4, -0.2], [-0.2, 0.266667]])
    close(posterior.mean[0], [0.2, 0.733333])
    close(posterior.log_predictive(np.array([[1.0, 3.0]]), 2.5), [-1.398617])
    posterior.absorb(np.array([3.0]), 2.5)
    close(posterior.mean[0], [0.192308, 0.75641])
    close(posterior.covariance[0], [[0.384615, -0.153846], [-0.153846, 0.128205]])


def test_the_noise_can_be_learned():
    posterior = ParentPosterior({(0,): 1.0}, PHI, Y, noise="nig")
    close(posterior.mean[0], [0.2, 0.733333])
    close([posterior.shape[0], posterior.scale[0]], [3.5, 1.366667])
    close(posterior.log_predictive(np.array([[1.0, 3.0]]), 2.5), [-0.967720])
    close(student_log_density(np.array([0.1]), np.array([7.0]), np.array([1.015238])), [-0.967720])


OBSERVED = np.array([[-1, -0.5, -2.1], [0, 0.2, 0.1], [1, 0.3, 1.9], [0.5, -0.1, 1.2], [-0.5, 0.1, -1.1]])
SETS = {(): 0.1, (0,): 0.3, (1,): 0.3, (0, 1): 0.3}


def test_interventions_tell_a_cause_from_what_correlates():
    posterior = ParentPosterior(SETS, OBSERVED[:, :2], OBSERVED[:, 2], noise=0.5)
    posterior.absorb(np.array([0.1, 2.0]), 0.3)
    close(list(posterior.probabilities.values()), [0.177242, 0.604571, 0.002934, 0.215253])
    posterior.absorb(np.array([-1.5, 0.0]), -2.9)
    close(list(posterior.probabilities.values()), [0, 0.738262, 0, 0.261738])
    close(posterior.marginals(2), [1.0, 0.261738])
    posterior.prune()
    assert posterior.sets == [(0,), (0, 1)]
    assert posterior.best == (0,)


def test_rows_one_by_one_weigh_as_all_at_once():
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((12, 2)), rng.standard_normal(12)
    posterior = ParentPosterior(SETS, OBSERVED[:, :2], OBSERVED[:, 2], noise="nig")
    for row, value in zip(x, y, strict=True):
        posterior.absorb(row, float(value))
    evidence = interventional_evidence(Sums(OBSERVED[:, :2], OBSERVED[:, 2]), Sums(x, y))
    log_p = np.log(list(SETS.values())) + [evidence(each) for each in SETS]
    close(posterior.weights, np.exp(log_p - log_p.max()) / np.exp(log_p - log_p.max()).sum(), 1e-9)


def test_thousands_of_rows_do_not_underflow():
    rng = np.random.default_rng(2)
    posterior = ParentPosterior({(): 0.5, (0,): 0.5}, PHI, Y, noise=0.05)
    for _ in range(1000):
        posterior.absorb(rng.standard_normal(1), float(rng.standard_normal()))
    assert np.isfinite(posterior.weights).all()


def test_curved_effects_need_curved_features_and_the_empty_set_is_a_constant():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 2))
    y = np.sin(2 * x[:, 0]) + 0.1 * rng.standard_normal(120)
    sets = {(): 0.25, (0,): 0.25, (1,): 0.25, (0, 1): 0.25}
    fourier = FourierFeatures(list(sets), 2, rng)
    assert fourier(x)[0].tolist() == [[1.0, *[0.0] * 99]] * 120
    posterior = ParentPosterior(sets, x[:80], y[:80], noise=0.1, features=fourier)
    for row, value in zip(x[80:], y[80:], strict=True):
        posterior.absorb(row, float(value))
    assert posterior.best == (0,)
    effect = do_effect(posterior, x[:80], 0, np.array([0.0, 0.8]))
    close(effect.mean, [0.0, np.sin(1.6)], 0.15)


# the choice


def test_beliefs_are_averaged_with_their_spread():
    mean, variance = averaged(np.array([0.6, 0.3, 0.1]), np.array([[1.0], [2], [0]]), np.array([[0.5], [0.2], [1]]))
    close([mean[0], variance[0]], [1.2, 0.82])


def test_the_closed_form_is_the_average_over_the_rows():
    posterior = ParentPosterior(SETS, OBSERVED[:, :2], OBSERVED[:, 2], noise=0.5)
    x, value = OBSERVED[:, :2], 1.3
    effect = do_effect(posterior, x, 1, np.array([value]))
    means, variances = [], []
    for index in range(len(SETS)):
        rows = x.copy()
        rows[:, 1] = value
        phi = LinearFeatures(list(SETS))(rows)[index]
        means.append([(phi @ posterior.mean[index]).mean()])
        variances.append([0.25 + np.einsum("ni,ij,nj->n", phi, posterior.covariance[index], phi).mean()])
    mean, variance = averaged(posterior.weights, np.array(means), np.array(variances))
    close(effect.mean, mean)
    close(effect.variance, variance)


def test_the_surrogate_starts_from_what_is_believed():
    seen_values = np.array([-1, 0.5])
    at = Effect(np.array([0.0]), np.array([0.25]), np.zeros(1))
    seen = Effect(-seen_values, np.array([0.09, 0.64]), np.zeros(2))
    mean, variance = gaussian_process(at, seen, np.array([0.0]), seen_values, np.array([1.4, -0.9]))
    close([mean[0], variance[0]], [-0.123695, 0.136310])
    close(expected_improvement(mean, np.sqrt(variance), -0.9), [0.002371])


@pytest.mark.parametrize(
    ("mean", "deviation", "best", "expected"),
    [
        (0, 1, 0, 0.398942280),
        (-1, 0.5, -0.5, 0.541657735),
        (1, 0.5, 0, 0.004245351),
        (0.3, 1e-9, 0.5, 0.2),
        (0.3, 0, 0.5, 0.2),
    ],
)
def test_expected_improvement(mean, deviation, best, expected):
    close(expected_improvement(np.array([mean]), np.array([deviation]), best), [expected], 1e-8)


def test_only_possible_parents_are_explored_and_all_when_there_are_none():
    assert exploration_set([(0, 3), (1,)], 5) == [0, 1, 3]
    assert exploration_set([()], 3) == [0, 1, 2]


# the whole


def test_metrics_of_sets_and_of_beliefs():
    assert (jaccard([1, 2], [1, 2, 3]), jaccard([], []), jaccard([1], [2])) == (pytest.approx(2 / 3), 1.0, 0.0)
    found = expected_metrics({(0,): 0.7, (0, 1): 0.2, (2,): 0.1}, [0], [0, 1, 2, 3])
    close([found["accuracy"], found["f1"]], [0.9, 0.833333])


def test_the_gap_is_the_share_of_the_possible_improvement():
    problem, _, _ = make_problem(ProblemConfig(), "difficulty_1", 0)
    lowest = problem.scm.best_mean(problem.low, problem.high)
    assert problem.gap(problem.start, "min") == 0
    assert problem.gap(lowest, "min") == pytest.approx(1)
    assert problem.gap(problem.start - 0.75 * (problem.start - lowest), "min") == pytest.approx(0.75)
    highest = problem.scm.best_mean(problem.low, problem.high, sign=-1)
    assert highest > problem.start > lowest
    assert problem.gap(highest, "max") == pytest.approx(1)


LINEAR = ProblemConfig()


def run(level, index, config, problem_config=LINEAR):
    problem, world, rng = make_problem(problem_config, level, index)
    expert = Expert(config, problem.scm.target, problem.observed, problem.rows, problem.intervened, rng)
    for _ in range(config.steps):
        choice = expert.choose()
        assert problem.low[choice.variable] <= choice.value <= problem.high[choice.variable]
        expert.observe(choice.variable, choice.value, *world.intervene(choice.variable, choice.value))
    return problem, expert


@pytest.mark.parametrize("task", ["min", "max"])
def test_the_expert_finds_parents_and_good_interventions(task):
    config = ExpertConfig(task=task)
    ended = [run(level, index, config) for level in ("difficulty_1", "difficulty_3") for index in range(5)]
    assert np.mean([jaccard(expert.parents, problem.scm.parents) for problem, expert in ended]) > 0.85
    assert np.mean([problem.gap(expert.best, task) for problem, expert in ended]) > 0.9


def test_search_finds_parents_among_many_variables():
    found = {}
    for search in (True, False):
        ended = [run("difficulty_5", index, ExpertConfig(steps=1, bootstraps=3, search=search)) for index in (0,)]
        found[search] = np.mean([jaccard(expert.parents, problem.scm.parents) for problem, expert in ended])
    assert found[True] > found[False] + 0.2


def test_climbing_reaches_what_is_several_steps_away():
    wanted = {1, 4, 6}
    found = climb([(0, 2, 3, 5)], 8, lambda parents: -float(len(wanted ^ set(parents))))
    assert found[0] == (1, 4, 6)


def test_without_noise_free_outcomes_nothing_is_better_than_the_start():
    problem, _ = run("difficulty_1", 0, ExpertConfig(steps=1))
    expert = Expert(
        ExpertConfig(), problem.scm.target, problem.observed, problem.rows, problem.intervened, np.random.default_rng(0)
    )
    assert expert.best == pytest.approx(problem.start)


def test_a_curved_model_is_learned_with_curved_features():
    curved = ProblemConfig(mechanism="tanh")
    config = ExpertConfig(features="fourier", regressor="rff_ridge", steps=2, grid=9)
    ended = [run("difficulty_1", index, config, curved) for index in range(3)]
    assert np.mean([jaccard(expert.parents, problem.scm.parents) for problem, expert in ended]) > 0.5


def test_a_world_answers_with_the_rows_that_a_record_can_hold():
    world = World(CHAIN, np.random.default_rng(0))
    rows = world.observe(5)
    assert rows.tolist() == np.round(rows, 4).tolist()
    outcome, row = world.intervene(1, 0.5)
    assert outcome == pytest.approx(0.25)
    assert row[1] == 0.5
