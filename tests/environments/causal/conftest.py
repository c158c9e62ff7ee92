"""A small set of real demonstrations, made once."""

import asyncio

import pytest


@pytest.fixture(scope="session")
def demos(tmp_path_factory):
    """A folder with 24 attempts of difficulty_1 and difficulty_2."""
    pytest.importorskip("scipy")
    from atroposlib.environments.causal.collect import Plan, collect
    from atroposlib.environments.causal.demonstration import DemonstrationConfig

    folder = tmp_path_factory.mktemp("demos")
    plan = Plan(["difficulty_1", "difficulty_2"], 24)
    asyncio.run(collect(folder, DemonstrationConfig(), plan, workers=1, serial=True))
    return folder
