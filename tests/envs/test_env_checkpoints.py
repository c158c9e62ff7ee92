from atroposlib.envs.hooks import newest_checkpoint, write_checkpoint


def test_the_newest_checkpoint_that_is_not_ahead_is_found_under_any_registration_index(tmp_path):
    write_checkpoint(str(tmp_path), "gsm8k_0", 5, {"seen": 1})
    latest = write_checkpoint(str(tmp_path), "gsm8k_0", 10, {"seen": 2})
    write_checkpoint(str(tmp_path), "gsm8k_0", 15, {"seen": 3})
    assert newest_checkpoint(str(tmp_path), "gsm8k_1", 12) == latest


def test_another_environments_checkpoints_are_not_taken(tmp_path):
    write_checkpoint(str(tmp_path), "other_0", 5, {})
    assert newest_checkpoint(str(tmp_path), "gsm8k_0", 9) is None


def test_a_trainer_without_a_checkpoint_folder_keeps_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_checkpoint("", "gsm8k_0", 5, {"seen": 1}) is None
    assert newest_checkpoint("", "gsm8k_0", 5) is None
    assert list(tmp_path.iterdir()) == []
