"""The journal of responses: what is read back, what is dropped, and what a torn or failing disk does."""

import errno
import os
from pathlib import Path

import pytest

from atroposlib.rollouts import journal as journal_module
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.rollouts.trace import EngineReply

REPLY = EngineReply(finish_reasons=["stop"], prompt_tokens=2, completion_tokens=3, sampling={"temperature": 1.0})


def open_journal(folder, done=()):
    return ResponseJournal(folder / "run.journal", set(done))


def segments(folder):
    return sorted(path.name for path in folder.glob("run.journal.*"))


def finish(journal, item="7", sample=b"a", ids=(5, 6, 7)):
    draft = journal.open(item, sample)
    draft.grow(list(ids), [-0.1 * token for token in ids], base=0, version="v1")
    draft.finish(REPLY, prompt_ids=[1, 2])
    return draft


def test_a_finished_response_is_the_same_after_a_restart(tmp_path):
    finish(open_journal(tmp_path))  # never closed: the process was killed
    draft = open_journal(tmp_path).open("7", b"a")
    assert draft.reply == REPLY
    assert (draft.prompt_ids.tolist(), draft.ids.tolist()) == ([1, 2], [5, 6, 7])
    assert draft.logprobs.tolist() == [-0.5, -0.6000000000000001, -0.7000000000000001]


def test_another_sample_and_another_item_know_nothing_of_it(tmp_path):
    finish(open_journal(tmp_path))
    journal = open_journal(tmp_path)
    assert journal.open("7", b"b").reply is None
    assert journal.open("8", b"a").reply is None


def test_a_response_in_the_making_is_written_at_every_step_of_tokens_and_continues_after_a_restart(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(journal_module, "PIECE_TOKENS", 3)
    draft = open_journal(tmp_path).open("7", b"a")
    draft.grow([1, 2], [-1.0, -2.0], base=0, version="v1")
    draft.grow([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0], base=0, version="v1")
    draft.grow([1, 2, 3, 4, 5], [-1.0, -2.0, -3.0, -4.0, -5.0], base=0, version="v1")

    again = open_journal(tmp_path).open("7", b"a")
    assert again.reply is None
    assert again.ids.tolist() == [1, 2, 3, 4]
    again.grow([9], [-9.0], base=4, version="v2")
    again.finish(REPLY, prompt_ids=[1])

    last = open_journal(tmp_path).open("7", b"a")
    assert last.ids.tolist() == [1, 2, 3, 4, 9]
    assert last.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -9.0]
    assert last.version == "v1"


def test_the_end_of_a_response_is_never_a_piece_to_continue_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "PIECE_TOKENS", 1)
    draft = open_journal(tmp_path).open("7", b"a")
    draft.grow([1, 2], [-1.0, -2.0], base=0, version="v1")
    draft.grow([1, 2, 99], [-1.0, -2.0, -3.0], base=0, version="v1", is_over=True)
    assert open_journal(tmp_path).open("7", b"a").ids.tolist() == [1, 2]  # killed before `finish`


def test_a_response_begun_again_replaces_what_was_there(tmp_path):
    journal = open_journal(tmp_path)
    draft = journal.open("7", b"a")
    draft.grow([1, 2], [-1.0, -2.0], base=0, version=None)
    draft.save(None)
    draft.restart()
    draft.grow([8, 9, 10], [-8.0, -9.0, -10.0], base=0, version=None)
    draft.finish(REPLY, prompt_ids=[1])
    assert open_journal(tmp_path).open("7", b"a").ids.tolist() == [8, 9, 10]


def test_a_draft_opened_again_is_the_only_one_that_writes(tmp_path):
    journal = open_journal(tmp_path)
    stale = journal.open("7", b"a")
    finish(journal)
    stale.grow([1], [-1.0], base=0, version=None)
    stale.finish(REPLY, prompt_ids=[1])
    assert open_journal(tmp_path).open("7", b"a").ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_record_costs_only_itself(tmp_path, cut):
    journal = open_journal(tmp_path)
    finish(journal, sample=b"a")
    finish(journal, sample=b"b")
    (path,) = tmp_path.glob("run.journal.*")
    path.write_bytes(path.read_bytes()[:-cut])
    journal = open_journal(tmp_path)
    assert journal.open("7", b"a").reply == REPLY
    assert journal.open("7", b"b").reply is None
    finish(journal, sample=b"b")
    assert open_journal(tmp_path).open("7", b"b").reply == REPLY


def test_segments_go_when_their_groups_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)
    journal = open_journal(tmp_path)
    for item in ("1", "2", "3"):
        finish(journal, item)
    assert segments(tmp_path) == ["run.journal.1", "run.journal.2", "run.journal.3"]
    journal.settle("2")
    assert segments(tmp_path) == ["run.journal.1", "run.journal.3"]
    journal.settle("1")
    journal.settle("3")
    journal.close()
    assert segments(tmp_path) == []


def test_a_restart_removes_what_belongs_to_recorded_groups_and_writes_to_a_new_segment(tmp_path):
    first = open_journal(tmp_path)
    finish(first, "1")
    journal = open_journal(tmp_path, done={"1"})
    assert segments(tmp_path) == []
    finish(journal, "2")
    finish(open_journal(tmp_path, done={"1"}), "3")
    assert len(segments(tmp_path)) == 2


def test_a_full_disk_costs_the_journal_but_not_the_run(tmp_path, monkeypatch):
    journal = open_journal(tmp_path)
    finish(journal, sample=b"a")

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        draft = finish(journal, sample=b"b")
    assert draft.reply == REPLY
    finish(journal, sample=b"c")
    again = open_journal(tmp_path)
    assert [again.open("7", sample).reply is not None for sample in (b"a", b"b", b"c")] == [True, False, True]


def test_a_response_without_its_beginning_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "PIECE_TOKENS", 1)
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 1)  # a segment each
    journal = open_journal(tmp_path)
    draft = journal.open("7", b"a")
    draft.grow([1, 2], [-1.0, -2.0], base=0, version="v1")
    draft.grow([1, 2, 3], [-1.0, -2.0, -3.0], base=0, version="v1")
    draft.finish(REPLY, prompt_ids=[1])
    (tmp_path / "run.journal.1").unlink()
    for each in (open_journal(tmp_path), journal):
        found = each.open("7", b"a")
        assert (found.reply, found.ids.tolist()) == (None, [])
    finish(journal)
    assert open_journal(tmp_path).open("7", b"a").ids.tolist() == [5, 6, 7]


def test_a_segment_that_is_taken_away_is_followed_by_a_new_one(tmp_path):
    journal = open_journal(tmp_path)
    finish(journal, item="7")
    (tmp_path / "run.journal.1").unlink()
    finish(journal, item="8")  # finds that it is gone
    finish(journal, item="9")
    again = open_journal(tmp_path)
    assert [again.open(item, b"a").reply is not None for item in ("7", "8", "9")] == [False, False, True]


def test_a_segment_that_cannot_be_removed_costs_only_its_place(tmp_path, monkeypatch, caplog):
    finish(open_journal(tmp_path))

    def read_only(self, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", read_only)
        open_journal(tmp_path, done={"7"})
    assert "run.journal.1 is not needed any more and cannot be removed" in caplog.text
    assert open_journal(tmp_path, done={"7"}).open("7", b"a").reply is None
    assert segments(tmp_path) == []


def test_zeros_that_a_failed_machine_left_are_a_torn_end(tmp_path):
    finish(open_journal(tmp_path))
    with (tmp_path / "run.journal.1").open("ab") as segment:
        segment.write(bytes(4096))
    assert open_journal(tmp_path).open("7", b"a").reply == REPLY
