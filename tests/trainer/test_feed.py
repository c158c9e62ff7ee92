import asyncio

import pytest
from tiny_model import make_config, make_group

from atroposlib.api.client import Batch
from atroposlib.errors import ApiError
from atroposlib.example_trainer import data
from atroposlib.example_trainer.data import BatchFeed, generate_times, staleness


class ScriptedClient:
    """Hands out batches by id, and remembers acknowledgements."""

    def __init__(self):
        self.coming, self.acked, self.registered = [], [], []
        self.url, self.refusal, self.away = "http://api", None, False

    async def register(self, registration, *, deadline_s=None):
        self.deadline_s = deadline_s
        if self.away:
            await asyncio.Event().wait()
        self.registered.append(registration)
        return 1

    async def batch(self, lease_s=None, binary=False, *, deadline_s=None):
        if self.away:
            await asyncio.Event().wait()  # as a client does that waits for its server
        return Batch([make_group([1, 0])], self.coming.pop(0)) if self.coming else None

    async def ack(self, batch_id, *, deadline_s=None):
        if self.away:
            await asyncio.Event().wait()
        if self.refusal:
            raise self.refusal
        self.acked.append(batch_id)

    async def status(self, *, deadline_s=None):
        raise ApiError("no answer")

    async def close(self):
        pass


@pytest.fixture
def client(monkeypatch):
    scripted = ScriptedClient()
    monkeypatch.setattr(data, "TrainerClient", lambda url: scripted)
    return scripted


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path, tmp_path, training_steps=9)


def never():
    return False


def test_a_batch_is_acknowledged_only_when_a_checkpoint_holds_it(client, config):
    client.coming = ["a", "b"]
    with BatchFeed(config, trained=[]) as feed:
        for _ in range(2):
            feed.note_trained(feed.next(never))
        assert client.acked == []
        assert feed.unacknowledged == ["a", "b"]
        feed.saved(never)
        assert client.acked == ["a", "b"]
        assert feed.unacknowledged == []


def test_a_batch_that_comes_again_is_not_trained_again(client, config):
    client.coming = ["a", "a", "b"]
    with BatchFeed(config, trained=[]) as feed:
        feed.note_trained(feed.next(never))
        assert feed.next(never).batch_id == "b"


def test_a_batch_whose_acknowledgement_did_not_arrive_is_not_trained_again(client, config):
    client.coming = ["a", "a", "b"]
    client.refusal = ApiError("waited 60 s for POST http://api/batch/ack (9 attempts); the last said: 503: busy")
    with BatchFeed(config, trained=[]) as feed:
        feed.note_trained(feed.next(never))
        feed.saved(never)
        assert feed.unacknowledged == ["a"]
        assert feed.next(never).batch_id == "b"
        client.refusal = None
        feed.saved(never)
    assert client.acked == ["a"]


def test_a_batch_that_the_api_does_not_know_is_done(client, config):
    client.refusal = ApiError("POST http://api/batch/ack answered 404: batch_id is a", 404)
    with BatchFeed(config, trained=["a"]) as feed:
        feed.register(5, never)
        assert feed.unacknowledged == []


def test_a_stop_and_the_longest_wait_also_end_the_wait_for_an_api_that_is_away(client, config, monkeypatch):
    client.away = True
    monkeypatch.setattr(data, "_ARRIVING_S", 0)
    answers = iter([False, False, True, True])
    with BatchFeed(config, trained=[]) as feed:
        assert feed.next(lambda: next(answers)) is None
    with (
        BatchFeed(config.model_copy(update={"batch_wait_s": 0.1}), trained=[]) as feed,
        pytest.raises(ApiError, match="no batch for 0 s from http://api; no answer"),
    ):
        feed.next(never)


def test_a_stop_also_ends_the_registration_at_an_api_that_is_away(client, config, monkeypatch):
    client.away = True
    monkeypatch.setattr(data, "_ARRIVING_S", 0)
    answers = iter([False, True])
    with BatchFeed(config, trained=["a"]) as feed:
        feed.register(5, lambda: next(answers))
        assert feed.unacknowledged == ["a"]
    assert client.registered == []


def test_a_stop_leaves_what_an_api_that_is_away_was_not_told_to_the_next_start(client, config, monkeypatch):
    client.coming = ["a", "b"]
    monkeypatch.setattr(data, "_ARRIVING_S", 0)
    with BatchFeed(config, trained=[]) as feed:
        for _ in range(2):
            feed.note_trained(feed.next(never))
        client.away = True
        feed.saved(lambda: True)
        assert feed.unacknowledged == ["a", "b"]
    with BatchFeed(config, trained=["a", "b"]) as feed:
        client.away = False
        feed.register(2, never)
    assert client.acked == ["a", "b"]


@pytest.mark.parametrize(("batch_wait_s", "deadline_s"), [(None, 300), (20, 20), (900, 300)])
def test_registering_waits_no_longer_than_for_a_batch(client, config, batch_wait_s, deadline_s):
    with BatchFeed(config.model_copy(update={"batch_wait_s": batch_wait_s}), trained=[]) as feed:
        feed.register(5, never)
    assert client.deadline_s == deadline_s


def test_a_batch_in_the_checkpoint_is_acknowledged_at_the_next_start(client, config):
    with BatchFeed(config, trained=["a"]) as feed:
        feed.register(5, never)
    assert client.acked == ["a"]
    assert client.registered[0]["starting_step"] == 5
    assert client.registered[0]["batch_size"] == 8


def test_waiting_ends_when_the_run_is_asked_to_stop(client, config):
    answers = iter([False, True])
    with BatchFeed(config, trained=[]) as feed:
        assert feed.next(lambda: next(answers)) is None


@pytest.mark.parametrize(
    ("params", "age"),
    [
        ({"weight_version_start": "3"}, 4),
        ({"weight_version": 7}, 0),
        ({"weight_version": "default"}, None),
        (None, None),
    ],
)
def test_staleness_counts_updates_since_the_first_token(params, age):
    assert staleness({"generation_params": params}, 7) == age


def test_how_long_groups_were_rolled_out_is_a_mean_and_a_maximum_over_those_that_tell():
    groups = [
        {"generation_params": {"duration_s": 2}},
        {"generation_params": None},
        {"generation_params": {"duration_s": 4}},
    ]
    assert generate_times(groups) == {"time/generate_mean_s": 3.0, "time/generate_max_s": 4.0}
    assert generate_times(groups[1:2]) == {}
