import errno
import os
import shutil
from typing import get_args

import pytest
import torch
from tiny_model import make_config, make_group
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    Llama4TextConfig,
    MistralConfig,
    PhimoeConfig,
    SeedOssConfig,
)

from atroposlib.errors import AtroposError, ConfigError, DataError, DiskError, ModelError, PathError
from atroposlib.example_trainer import checkpoint
from atroposlib.example_trainer.config import LossSettings
from atroposlib.example_trainer.data import rows_of
from atroposlib.example_trainer.layout import collate
from atroposlib.example_trainer.learner import Learner, TrainingError
from atroposlib.example_trainer.objective import plan

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own

GROUPS = [make_group([1, 0, 0, 1], completions=[3, 9, 5, 1], seed=1), make_group([0, 0, 1, 0], seed=2)]


def rows(groups=GROUPS, temperature=1.0):
    return rows_of(groups, seq_len=64, temperature=temperature)


def weights(learner):
    return torch.cat([p.detach().flatten() for p in learner.policy.trainable]).clone()


@pytest.fixture
def make_learner(tiny_model, tmp_path):
    def make(**changes):
        torch.manual_seed(0)
        return Learner(make_config(tiny_model, tmp_path, **changes))

    return make


def test_log_probabilities_are_those_of_the_tempered_distribution(tiny_model, make_learner):
    found = rows(temperature=0.7)
    micro = collate(found, [[1], [2]])
    scores = make_learner().policy.score(micro, entropy=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for line, number in enumerate([1, 2]):
        ids = torch.tensor(found[number].tokens)
        log_probs = torch.log_softmax(model(ids[None]).logits[0] / 0.7, -1)
        expected = torch.stack([log_probs[t - 1, ids[t]] for t in range(3, len(ids))])
        torch.testing.assert_close(scores.logp[line, 2 : len(ids) - 1], expected, atol=1e-5, rtol=0)
        entropy = -(log_probs.exp() * log_probs).sum(-1)[2 : len(ids) - 1]
        torch.testing.assert_close(scores.entropy[line, 2 : len(ids) - 1], entropy, atol=1e-4, rtol=0)


@pytest.mark.parametrize("objective", get_args(LossSettings.model_fields["objective"].annotation))
def test_the_cut_into_micro_batches_does_not_change_the_step(make_learner, objective):
    options = {"objective": objective, "init_kl_coeff": 0.1, "max_grad_norm": 1e9}
    whole, cut = make_learner(**options), make_learner(**options, micro_batch_tokens=16)
    taught = {"distill_token_ids": [[[7]] * len(ids) for ids in GROUPS[0]["tokens"]]}
    taught["distill_logprobs"] = [[[-0.5]] * len(ids) for ids in GROUPS[0]["tokens"]]
    first, second = (learner.train_on(rows([GROUPS[0] | taught, GROUPS[1]])) for learner in (whole, cut))
    assert first["train/loss"] == pytest.approx(second["train/loss"], abs=1e-5)
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-3)
    assert first["train/grad_norm"] > 0


def test_sharing_a_prompt_changes_neither_numbers_nor_gradients(make_learner):
    group = make_group([1, 0, 0, 1], prompt=20, completions=[3, 9, 5, 1])
    for ids in group["tokens"]:
        ids[:20] = range(10, 30)
    group["tokens"][2][20:22] = group["tokens"][1][20:22]
    found = rows([group, make_group([0, 1], completions=[30, 2])])
    shared, apart = make_learner(init_kl_coeff=0.1), make_learner(init_kl_coeff=0.1, share_prompts=False)
    one = shared.policy.score(collate(found, [[0, 1, 2, 3], [4], [5]]), entropy=True)
    two = apart.policy.score(collate(found, [[i] for i in range(6)]), entropy=True)
    torch.testing.assert_close(one.logp, two.logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.entropy, two.entropy, atol=1e-5, rtol=0)
    first, second = shared.train_on(found), apart.train_on(found)
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-4)
    torch.testing.assert_close(weights(shared), weights(apart), atol=1e-4, rtol=0)


WINDOWED = {
    "a window shorter than the sequences": (MistralConfig, {"sliding_window": 8}, False),
    "a window that holds them": (MistralConfig, {"sliding_window": 64}, True),
    "attention that is not sdpa": (Gemma2Config, {"sliding_window": 64}, False),
}


@pytest.mark.parametrize(("kind", "extra", "shares"), WINDOWED.values(), ids=WINDOWED)
def test_a_prompt_is_shared_only_where_the_model_minds_the_mask(
    make_learner, tiny_model, tmp_path, kind, extra, shares
):
    torch.manual_seed(0)
    config = kind(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        **extra,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "windowed")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "windowed")
    group = make_group([1, 0, 0, 1], prompt=20)
    for ids in group["tokens"]:
        ids[:20] = range(10, 30)
    asked, apart = (make_learner(model_name=str(tmp_path / "windowed"), share_prompts=share) for share in (True, False))
    assert asked.share_prompts == shares
    first, second = asked.train_on(rows([group])), apart.train_on(rows([group]))
    assert first["train/loss"] == pytest.approx(second["train/loss"], rel=1e-4)
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-4)


def write_model(folder, tiny_model, config):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "initializer_range": 0.5, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}  # fmt: skip
MODELS = {
    "dropout in modules": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.5),
    "dropout in functions": SeedOssConfig(**SIZES, intermediate_size=64, head_dim=8, num_key_value_heads=2),
    "positions that a mask cannot say": FalconConfig(**SIZES, alibi=True),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_scores_in_training_are_those_of_the_engine(make_learner, tiny_model, tmp_path, config, checkpointing):
    folder = write_model(tmp_path / "model", tiny_model, config)
    learner = make_learner(model_name=folder, gradient_checkpointing=checkpointing)
    group = make_group([1, 0], prompt=20)
    for ids in group["tokens"]:
        ids[:20] = range(10, 30)
    found, model = rows([group]), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    all_logp = [model(torch.tensor(row.tokens)[None]).logits[0, :-1].log_softmax(-1) for row in found]
    group["inference_logprobs"] = [
        [1.0, *logp[range(len(logp)), row.tokens[1:]].tolist()] for logp, row in zip(all_logp, found, strict=True)
    ]
    assert learner.train_on(rows([group]))["train/logprob_diff_max"] < 1e-4


def test_layers_are_also_found_under_other_names(make_learner, tiny_model, tmp_path):
    folder = write_model(tmp_path / "model", tiny_model, MODELS["dropout in modules"])
    learner = make_learner(model_name=folder, train_layer_indices="1")
    names = {name for name, p in learner.policy.model.named_parameters() if p.requires_grad}
    assert names
    assert all(".h.1." in name for name in names)


REFUSED = {
    "hidden states that cannot be had": Llama4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=2
    ),
    "experts at random in training": PhimoeConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=64, num_local_experts=16
    ),
}


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED)
def test_a_model_whose_logits_would_be_others_than_the_engines_is_refused(make_learner, tiny_model, tmp_path, config):
    folder = write_model(tmp_path / "model", tiny_model, config)
    with pytest.raises(ModelError, match="ForCausalLM makes logits in a way"):
        make_learner(model_name=folder)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning")  # peft's own
@pytest.mark.parametrize("module", ["query", "embed_tokens", "lm_head"])
def test_an_adapter_that_cannot_be_made_or_served_is_one_sentence(make_learner, module):
    with pytest.raises(ConfigError, match=f"lora_target_modules .*'{module}'"):
        make_learner(use_lora=True, lora_target_modules=["q_proj", module] if module != "query" else [module])


def test_the_clipped_ratios_of_gspo_are_those_of_sequences(make_learner):
    group = make_group([1, 0], completions=[4, 4])
    logp = make_learner().policy.score(collate(rows([group]), [[0], [1]])).logp.detach()[:, 2:]
    wobble = torch.tensor([0.1, -0.1, 0.1, -0.1])  # means of 0: no sequence has moved
    group["inference_logprobs"] = [[1.0] * 3 + line for line in (logp + wobble).tolist()]
    metrics = make_learner(objective="gspo").train_on(rows([group]))
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert make_learner(objective="grpo", clip_eps=3e-4).train_on(rows([group]))["train/clip_fraction"] > 0


def test_adafactor_may_choose_its_own_lr(make_learner):
    learner = make_learner(optimizer="adafactor", adafactor_relative_step=True)
    before = weights(learner)
    assert learner.train_on(rows())["train/lr"] > 0
    assert not torch.equal(weights(learner), before)


def test_a_step_raises_the_probability_of_the_better_response(make_learner):
    learner, found = make_learner(objective="dr_grpo", old_logprobs="trainer", lr=1e-2), rows()
    micro = collate(found, [[0], [1]])
    before = learner.policy.score(micro).logp.sum(1)
    learner.train_on(found)
    after = learner.policy.score(micro).logp.sum(1)
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_groups_of_equal_rewards_are_counted_and_change_nothing(make_learner):
    learner = make_learner()
    before = weights(learner)
    metrics = learner.train_on(rows([make_group([1, 1, 1]), make_group([0, 0])]))
    assert metrics["batch/zero_signal_groups"] == 2
    assert metrics["train/loss"] == 0
    assert torch.equal(weights(learner), before)


def test_zero_signal_groups_still_count_in_the_mean(make_learner):
    flat = make_group([1, 1, 1, 1], completions=[4, 4, 4, 4])
    mixed = make_group([1, 0, 0, 1], completions=[4, 4, 4, 4])
    alone = make_learner(old_logprobs="trainer").train_on(rows([mixed]))["train/grad_norm"]
    diluted = make_learner(old_logprobs="trainer").train_on(rows([mixed, flat]))["train/grad_norm"]
    assert diluted == pytest.approx(alone / 2, rel=1e-4)


def test_the_gap_to_the_engine_is_reported(make_learner):
    found = rows()
    learner = make_learner()
    gaps = [(learner.policy.score(collate(found, [[i]])).logp[0] + 2.0)[2:].abs().detach() for i in range(len(found))]
    gaps = torch.cat(gaps)
    metrics = learner.train_on(found)
    assert metrics["train/logprob_diff_mean"] == pytest.approx(gaps.mean().item(), rel=1e-4)
    assert metrics["train/logprob_diff_max"] == pytest.approx(gaps.max().item(), rel=1e-4)
    assert 0 < metrics["train/clip_fraction"] < 1


def test_missing_engine_log_probabilities_are_an_error_that_names_the_way_out(make_learner):
    group = make_group([1, 0]) | {"inference_logprobs": None}
    with pytest.raises(DataError, match="set old_logprobs to 'trainer'"):
        make_learner().train_on(rows([group]))
    assert make_learner(old_logprobs="trainer").train_on(rows([group]))["train/logprob_unknown"] == 1


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_weights(make_learner):
    learner = make_learner()
    before = weights(learner)
    poisoned = make_group([1, 0], advantages=[[float("inf")] * 7, [float("inf")] * 8])
    with pytest.raises(TrainingError, match="step 1: loss"):
        learner.train_on(rows([poisoned]))
    assert torch.equal(weights(learner), before)
    assert learner.step == 0


def test_kl_is_zero_at_the_start_and_grows_with_training(make_learner):
    learner = make_learner(init_kl_coeff=0.01, old_logprobs="trainer", kl_target=1e-6, kl_horizon=10)
    assert learner.train_on(rows())["train/kl"] == pytest.approx(0, abs=1e-6)
    beta = learner.kl.beta
    assert learner.train_on(rows())["train/kl"] > 1e-6
    assert learner.kl.beta > beta


def test_infinite_tau_trains_exactly_like_dr_grpo(make_learner):
    xdr, dr = make_learner(objective="xdr_grpo", maxent_tau=float("inf")), make_learner(objective="dr_grpo")
    xdr.train_on(rows())
    dr.train_on(rows())
    assert torch.equal(weights(xdr), weights(dr))


def test_the_penalty_is_also_that_of_rows_which_xdr_gives_no_weight(make_learner):
    options = {"objective": "xdr_grpo", "init_kl_coeff": 10.0}
    zero, small = make_learner(**options, maxent_tau=0.0), make_learner(**options, maxent_tau=0.003)
    for _ in range(2):
        first, second = zero.train_on(rows()), small.train_on(rows())
    assert first["train/kl"] == pytest.approx(second["train/kl"], rel=1e-3)
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-3)


def test_the_teacher_also_teaches_rows_which_xdr_gives_no_weight(make_learner):
    taught = {"distill_token_ids": [[[7]] * len(ids) for ids in GROUPS[0]["tokens"]]}
    taught["distill_logprobs"] = [[[-0.5]] * len(ids) for ids in GROUPS[0]["tokens"]]
    options = {"objective": "xdr_grpo", "distill_coeff": 1.0, "max_grad_norm": 1e9}
    zero, small = make_learner(**options, maxent_tau=0.0), make_learner(**options, maxent_tau=0.003)
    first, second = (learner.train_on(rows([GROUPS[0] | taught])) for learner in (zero, small))
    assert first["train/grad_norm"] == pytest.approx(second["train/grad_norm"], rel=1e-3)


def test_the_penalty_is_also_that_of_rows_which_maxent_gives_no_weight(make_learner):
    config = make_learner(objective="maxent", maxent_q_temperature=1e-3, maxent_q_epsilon=0.0).config
    found = rows([GROUPS[0], make_group([1, 1])])
    step = plan(config, found, tau=1e-3, beta=1e-3, ref_sums=torch.zeros(len(found)))
    assert (step.weights > 0).tolist() == [True, False, False, True, False, False]
    assert step.signal.tolist() == [True, True, True, True, False, False]


def test_a_row_whose_advantage_is_to_be_zero_is_not_imitated(make_learner):
    learner = make_learner(objective="maxent")
    before = weights(learner)
    learner.train_on(rows([make_group([1, 0], overrides=[{"set_advantage_to_zero": True}] * 2)]))
    assert torch.equal(weights(learner), before)


def test_truncated_responses_can_be_left_out(make_learner):
    found = rows([make_group([1, 0, 0], completions=[4, 32, 5])])
    metrics = make_learner(mask_truncated=True).train_on(found)
    assert metrics["batch/tokens"] == 9
    assert metrics["batch/truncated"] == pytest.approx(1 / 3)


def test_only_the_named_layers_are_trained(make_learner):
    learner = make_learner(train_layer_indices="1")
    names = {name for name, p in learner.policy.model.named_parameters() if p.requires_grad}
    assert names
    assert all(".layers.1." in name for name in names)


@pytest.mark.parametrize("options", [{}, {"use_lora": True}], ids=["all weights", "an adapter"])
def test_a_step_in_bfloat16_is_near_that_in_float32_with_scores_that_are_not_rounded(make_learner, options):
    rounded, exact = make_learner(dtype="bfloat16", **options), make_learner(**options)
    scores = rounded.policy.score(collate(rows(), [[0], [1]]), entropy=True)
    assert scores.logp.dtype == scores.entropy.dtype == torch.float32
    found, expected = rounded.train_on(rows()), exact.train_on(rows())
    assert found["train/entropy"] == pytest.approx(expected["train/entropy"], rel=0.05)
    assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=0.1)


def test_gradient_checkpointing_gives_the_same_step(make_learner):
    plain, thrifty = make_learner(), make_learner(gradient_checkpointing=True)
    plain.train_on(rows())
    thrifty.train_on(rows())
    torch.testing.assert_close(weights(plain), weights(thrifty), atol=1e-6, rtol=0)


RESUMED = {
    "all weights": {},
    "an adapter": {"use_lora": True},
    "controllers": {"objective": "maxent", "init_kl_coeff": 0.1, "kl_target": 0.1, "kl_horizon": 5,
                    "maxent_target_weight_entropy": 0.5},
    "a schedule": {"lr_schedule": "cosine", "warmup_steps": 2},
    "adafactor": {"optimizer": "adafactor"},
    "adafactor with its own lr": {"optimizer": "adafactor", "adafactor_relative_step": True},
}  # fmt: skip


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
def test_a_resumed_run_equals_one_that_was_never_stopped(make_learner, tmp_path, options):
    batches = [[make_group([1, 0, 0, 1], seed=10 + i), make_group([0, 1, 1, 0], seed=20 + i)] for i in range(4)]
    straight = make_learner(**options)
    for batch in batches:
        straight.train_on(rows(batch))
    stopped = make_learner(**options)
    for batch in batches[:2]:
        stopped.train_on(rows(batch))
    folder = checkpoint.save(stopped, tmp_path, batch_ids=["b7"], keep=1)
    resumed = Learner(stopped.config, checkpoint=folder)
    assert checkpoint.restore(resumed, folder) == ["b7"]
    assert resumed.step == 2
    for batch in batches[2:]:
        resumed.train_on(rows(batch))
    torch.testing.assert_close(weights(resumed), weights(straight), atol=1e-6, rtol=0)
    assert resumed.kl == straight.kl
    assert resumed.tau == straight.tau


def test_old_checkpoints_are_deleted_and_half_written_ones_ignored(make_learner, tmp_path):
    learner = make_learner()
    (tmp_path / ".making.step_00000099").mkdir()
    for step in (1, 2, 10):
        learner.step = step
        checkpoint.save(learner, tmp_path, batch_ids=[], keep=2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000002", "step_00000010"]
    assert checkpoint.newest(tmp_path) == tmp_path / "step_00000010"


def test_a_checkpoint_without_room_is_told_and_leaves_nothing(make_learner, tmp_path, monkeypatch):
    learner = make_learner()
    kept = checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    (tmp_path / ".making.step_00000007").mkdir()  # by a kill

    def full(state, path):
        path.write_bytes(b"half")
        raise RuntimeError("basic_ios::clear: iostream error")  # as torch has it

    monkeypatch.setattr(torch, "save", full)
    learner.step += 1
    with pytest.raises(PathError, match=r"step_00000001 cannot be written, with .* GB free there: basic_ios"):
        checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    assert list(tmp_path.iterdir()) == [kept]


def test_copies_that_a_user_made_of_a_checkpoint_are_neither_resumed_nor_deleted(make_learner, tmp_path):
    learner = make_learner()
    copies = {"step_00000010.good", "step_00000012_backup"}
    for name in copies:
        (tmp_path / name).mkdir()
    for step in (1, 10):
        learner.step = step
        checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    assert checkpoint.newest(tmp_path) == tmp_path / "step_00000010"
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000010", *copies}


def test_a_model_that_cannot_be_had_is_one_sentence(make_learner, tmp_path):
    with pytest.raises(ConfigError, match=r"mistyped', which is neither a model's folder with a tokenizer nor"):
        make_learner(model_name=str(tmp_path / "models" / "mistyped"))


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_tokenizer_that_cannot_be_read_is_one_sentence(make_learner, tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="which is neither a model's folder with a tokenizer nor"):
        make_learner(model_name=str(tmp_path))


def test_a_checkpoint_of_another_model_is_refused(make_learner, tmp_path):
    learner = make_learner()
    folder = checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    for change in ({"model_name": "other"}, {"use_lora": True}):
        with pytest.raises(DataError, match="choose another save_path"):
            checkpoint.require_same_model(learner.config.model_copy(update=change), folder)


ADAPTERS = {
    "lora_r": (4, "with lora_r 8, this run asks for 4"),
    "lora_alpha": (64, "with lora_alpha 16, this run asks for 64"),
    "lora_dropout": (0.5, r"with lora_dropout 0\.0, this run asks for 0\.5"),
    "lora_target_modules": (["q_proj"], "with lora_target_modules .*'v_proj'.*, this run asks for .*'q_proj'"),
    "lora_layer_indices": ("0", r"with lora_layer_indices \[0, 1\], this run asks for \[0\]"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_another_shape_than_the_checkpoints_is_refused(make_learner, tmp_path, name):
    modules = ["v_proj", "q_proj"]
    learner = make_learner(
        use_lora=True, lora_r=8, lora_alpha=16, lora_target_modules=modules, lora_layer_indices="0-1"
    )
    folder = checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    checkpoint.require_same_model(learner.config, folder)
    value, message = ADAPTERS[name]
    with pytest.raises(DataError, match=message):
        checkpoint.require_same_model(learner.config.model_copy(update={name: value}), folder)


def test_an_adapter_is_added_into_the_exported_weights(make_learner, tmp_path):
    learner = make_learner(use_lora=True, lr=0.1)
    for _ in range(3):
        learner.train_on(rows())
    micro = collate(rows(), [[0]])
    expected = learner.policy.score(micro).logp.detach()
    learner.policy.save_merged(tmp_path / "merged")
    merged = make_learner(model_name=str(tmp_path / "merged"))
    torch.testing.assert_close(merged.policy.score(micro).logp.detach(), expected, atol=1e-4, rtol=0)
    assert not torch.allclose(make_learner().policy.score(micro).logp, expected, atol=1e-2)


def test_settings_that_changed_before_a_resume_are_followed(make_learner, tmp_path):
    earlier = make_learner(lr=1e-3, init_kl_coeff=0.1, warmup_steps=2, weight_decay=0.1)
    earlier.train_on(rows())
    folder = checkpoint.save(earlier, tmp_path, batch_ids=[], keep=1)
    changes = {"lr": 1e-5, "init_kl_coeff": 0.3, "maxent_tau": 0.7, "weight_decay": 0.0}
    resumed = Learner(earlier.config.model_copy(update=changes), checkpoint=folder)
    checkpoint.restore(resumed, folder)
    settings = resumed.optimizer.param_groups[0]
    assert (settings["lr"], settings["weight_decay"]) == (pytest.approx(0.5e-5), 0)
    assert (resumed.kl.beta, resumed.tau.tau) == (0.3, 0.7)
    assert resumed.train_on(rows())["train/lr"] == pytest.approx(1e-5)


def test_a_penalty_that_was_switched_off_stays_off_after_a_resume(make_learner, tmp_path):
    earlier = make_learner(init_kl_coeff=0.1, kl_target=0.1, kl_horizon=5)
    folder = checkpoint.save(earlier, tmp_path, batch_ids=[], keep=1)
    resumed = Learner(earlier.config.model_copy(update={"init_kl_coeff": 0.0}), checkpoint=folder)
    checkpoint.restore(resumed, folder)
    assert "train/kl" not in resumed.train_on(rows())


def test_a_tokenizer_with_several_chat_templates_is_saved(make_learner, tmp_path):
    learner = make_learner()
    learner.policy.tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    folder = checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    assert AutoTokenizer.from_pretrained(folder).chat_template == {"default": "a", "tool_use": "b"}


def test_a_deletion_that_was_killed_leaves_nothing_that_looks_like_a_checkpoint(make_learner, tmp_path, monkeypatch):
    learner = make_learner()
    checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    learner.step = 1
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, ignore_errors=False: None)
        checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]
    (tmp_path / ".deleting").mkdir()  # as an earlier release named it
    learner.step = 2
    checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


FULL_FOR = {
    "tokenizers, which raises a plain Exception": "tokenizer.json",
    "torch": "training_state.pt",
    "transformers": "config.json",
    "json": "trainer.json",
}


@pytest.mark.parametrize("name", FULL_FOR.values(), ids=FULL_FOR)
def test_a_disk_that_is_full_for_any_library_is_told_as_such(make_learner, tmp_path, monkeypatch, name):
    learner = make_learner()
    write = checkpoint._write

    def to_a_full_disk(learner, making, batch_ids):
        (making / name).symlink_to("/dev/full")
        write(learner, making, batch_ids)

    monkeypatch.setattr(checkpoint, "_write", to_a_full_disk)
    with pytest.raises(DiskError, match="step_00000000 cannot be written"):
        checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_use_that_keeps_an_old_checkpoint_from_being_deleted_ends_no_training(
    make_learner, tmp_path, monkeypatch
):
    learner, unlink = make_learner(), os.unlink

    def busy(name, **place):  # as NFS has it for a file that is open elsewhere
        if name == "config.json":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(name, **place)

    def save(step):
        learner.step = step
        checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", busy)
        for step in (1, 2, 3):
            save(step)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000003"]
    save(4)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


DAMAGED = ["training_state.pt", "trainer.json", "model.safetensors", "adapter_model.safetensors", "adapter_config.json"]


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("left", [None, b"", b"[]", b"half"])
def test_a_damaged_checkpoint_is_named(make_learner, tmp_path, name, left):
    learner = make_learner(use_lora=name.startswith("adapter"))
    folder = checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    (folder / name).unlink()
    if left is not None:
        (folder / name).write_bytes(left)

    def resume():
        checkpoint.require_same_model(learner.config, folder)
        checkpoint.restore(Learner(learner.config, checkpoint=folder), folder)

    with pytest.raises(AtroposError, match="step_00000000"):
        resume()


@pytest.mark.parametrize("change", [{"optimizer": "adafactor"}, {"train_layer_indices": "1"}])
def test_an_optimizer_of_another_kind_or_for_other_layers_is_refused(make_learner, tmp_path, change):
    learner = make_learner()
    learner.train_on(rows())
    folder = checkpoint.save(learner, tmp_path, batch_ids=[], keep=1)
    config = learner.config.model_copy(update=change)
    with pytest.raises(DataError, match=f"step_00000001 holds a training with {next(iter(change))}"):
        checkpoint.require_same_model(config, folder)


def test_a_token_that_the_model_does_not_know_is_named(make_learner):
    group = make_group([1, 0])
    group["tokens"][1][-1] = group["masks"][1][-1] = 64
    with pytest.raises(DataError, match=r"sequence of group 0 has token 64, and the model .* 0 to 63"):
        make_learner().train_on(rows([group]))
