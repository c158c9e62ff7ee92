import asyncio
import sys
from pathlib import Path

import pytest
import typer

from atroposlib.environments.intern_bootcamp.bootcamp import Grading, tagged
from atroposlib.environments.intern_bootcamp.checkout import discover, read_quarantine
from atroposlib.environments.intern_bootcamp.hosted import pack, unpack
from atroposlib.environments.intern_bootcamp.quarantine import main as quarantine
from atroposlib.environments.intern_bootcamp.tasks import make_task
from atroposlib.errors import ConfigError, EnvironmentFault, VerifierFault
from atroposlib.sandbox.workers import WorkerPool

CHECKOUT = str(Path(__file__).parent / "fake_checkout")
LENIENT = Grading(format_score=0.2, short_penalty=False, short_threshold=0, format_penalty=False)


@pytest.fixture
async def sandbox():
    sandbox = WorkerPool(workers=1, timeout_s=5, memory_mb=1024)
    yield sandbox
    sandbox.close()


def test_classes_are_found_without_importing_the_checkout():
    assert list(discover(CHECKOUT)) == [
        "Dividesbootcamp",
        "Exitsonimportbootcamp",
        "Exitswhilejudgingbootcamp",
        "Guessesbootcamp",
        "Hangsbootcamp",
        "Hangswhilejudgingbootcamp",
        "Hungrybootcamp",
        "NoisybootCamp",
        "Raisesonimportbootcamp",
        "Restlessbootcamp",
    ]
    assert "internbootcamp" not in sys.modules


async def test_a_class_of_a_checkout_draws_and_judges_with_an_identity_that_is_no_json(sandbox):
    task = make_task("Dividesbootcamp", {"largest": 20}, sandbox, CHECKOUT)
    drawn = await task.draw(4)
    assert drawn == await task.draw(4)
    assert drawn != await task.draw(5)
    assert drawn["demonstration"] is None
    verdicts = [await judge(task, drawn, f"[answer]{answer}[/answer]") for answer in ("yes", "no")]
    assert sorted(verdicts) == [0.2, 1.0]
    assert await judge(task, drawn, "maybe") == 0.0


async def test_parameters_reach_a_constructor_that_takes_anything_and_a_dict_with_only_data_stays_one(sandbox):
    task = make_task("Guessesbootcamp", {"secret": 12}, sandbox, CHECKOUT)
    drawn = await task.draw(0)
    assert drawn["prompt"] == "Guess a number below 22."
    assert drawn["identity"] == {"data": 12}
    assert await judge(task, drawn, "12") == 1.0


async def test_output_of_a_class_on_stdout_does_not_disturb(sandbox):
    task = make_task("NoisybootCamp", {}, sandbox, CHECKOUT)
    drawn = await task.draw(0)
    assert await judge(task, drawn, "[answer]quiet[/answer]") == 1.0


BAD_GENERATORS = {
    "Hangsbootcamp": r"no result after 0\.5 s",
    "Hungrybootcamp": "out of memory",
    "Raisesonimportbootcamp": "a_package_that_nobody_has",
    "Exitsonimportbootcamp": "SystemExit",
}


@pytest.mark.parametrize("name", BAD_GENERATORS)
async def test_a_bad_generator_is_a_fault_and_other_tasks_go_on(sandbox, name):
    await make_task("Guessesbootcamp", {}, sandbox, CHECKOUT).draw(0)
    if name == "Hangsbootcamp":
        sandbox.timeout_s = 0.5
    with pytest.raises(EnvironmentFault, match=BAD_GENERATORS[name]):
        await make_task(name, {}, sandbox, CHECKOUT).draw(0)
    sandbox.timeout_s = 5
    assert (await make_task("Guessesbootcamp", {}, sandbox, CHECKOUT).draw(0))["prompt"].startswith("Guess")


BAD_VERIFIERS = {"Hangswhilejudgingbootcamp": r"no result after 0\.5 s", "Exitswhilejudgingbootcamp": "exit code 3"}


@pytest.mark.parametrize("name", BAD_VERIFIERS)
async def test_a_bad_verifier_is_a_fault_and_never_a_score(sandbox, name):
    task = make_task(name, {}, sandbox, CHECKOUT)
    drawn = await task.draw(0)
    sandbox.timeout_s = 0.5
    with pytest.raises(VerifierFault, match=BAD_VERIFIERS[name]):
        await judge(task, drawn, "anything")


async def test_the_event_loop_runs_on_while_a_verifier_hangs(sandbox):
    task = make_task("Hangswhilejudgingbootcamp", {}, sandbox, CHECKOUT)
    drawn = await task.draw(0)
    judging = asyncio.create_task(judge(task, drawn, "anything"))
    ticks = 0
    for _ in range(20):
        await asyncio.sleep(0)
        ticks += 1
    assert ticks == 20
    assert not judging.done()
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging


def test_the_quarantine_command_names_every_bad_class_with_its_reason_and_no_good_one(tmp_path, capsys):
    target = tmp_path / "quarantine.json"
    quarantine(path=CHECKOUT, output=str(target), problems=2, timeout_s=2, memory_mb=1024)
    faults = read_quarantine(target)
    assert set(faults) == set(discover(CHECKOUT)) - {"Dividesbootcamp", "Guessesbootcamp", "NoisybootCamp"}
    assert faults["Restlessbootcamp"] == "the same seed gives different problems"
    assert "nobody_has" in faults["Raisesonimportbootcamp"]
    assert capsys.readouterr().out == f"7 of 10 classes are in quarantine: {target}\n"


def test_the_quarantine_command_says_in_one_sentence_that_a_folder_is_no_checkout(tmp_path, capsys):
    with pytest.raises(typer.Exit):
        quarantine(path=str(tmp_path), output=str(tmp_path / "quarantine.json"))
    assert "is not a checkout of InternBootcamp" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


async def test_reasoning_gym_draws_the_same_problem_from_the_same_seed_and_judges_with_its_own_scorer(sandbox):
    task = make_task("reasoning_gym:chain_sum", {"min_terms": 2, "max_terms": 2}, sandbox, None)
    drawn = await task.draw(11)
    assert drawn == await task.draw(11)
    assert drawn["prompt"] != (await task.draw(12))["prompt"]
    assert await judge(task, drawn, drawn["demonstration"]) == 1.0
    assert await judge(task, drawn, tagged("nonsense")) == 0.2
    assert await judge(task, drawn, "nothing in tags") == 0.0


UNKNOWN = {
    "a misspelt one of ours": ("adition", None, "did you mean 'addition'?"),
    "a class without a checkout": ("Game24bootcamp", None, "need env.internbootcamp_path"),
    "a misspelt class": ("Dividebootcamp", CHECKOUT, "did you mean 'Dividesbootcamp'?"),
}


@pytest.mark.parametrize(("name", "checkout", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_task_is_refused_with_the_nearest_name(name, checkout, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        make_task(name, {}, WorkerPool(), checkout)


def test_parameters_that_a_task_does_not_take_are_refused():
    with pytest.raises(ConfigError, match=r"'addition'.*digit"):
        make_task("addition", {"digit": 2}, WorkerPool(), None)


PACKED = {
    "plain JSON": ({"a": [1, 2.5, None, True]}, "json"),
    "only a data key": ({"data": {"x": 1}}, "json"),
    "a tuple": ({"a": (1, 2)}, "pickle"),
    "numbers as keys": ({1: "a"}, "pickle"),
    "a set": ({1, 2}, "pickle"),
    "not a number": (float("nan"), "pickle"),
}


@pytest.mark.parametrize(("identity", "form"), PACKED.values(), ids=PACKED)
def test_an_identity_survives_packing_with_all_its_types(identity, form):
    packed, packed_as = pack(identity)
    assert packed_as == form
    assert repr(unpack(packed, packed_as)) == repr(identity)


async def judge(task, drawn, output):
    return await task.verify(output, drawn["identity"], drawn["identity_format"], LENIENT)
