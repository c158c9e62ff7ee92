"""What code outside this repository imports, calls and relies on: paths, names, parameters, defaults.

A parameter list is pinned as a prefix: the same names in the same order with the same defaults. More may follow when
they are optional. Parameter kinds written here: `a` required, `b=1` with that default, `**kw`.
"""

import importlib
import inspect

import pytest

IMPORTS = {
    "atroposlib.api": "app",
    "atroposlib.api.server": "app EnvIdentifier Info RegisterEnv Registration ScoredData Status",
    "atroposlib.api.utils": (
        "find_groups_summing_to_target grab_exact_from_heterogeneous_queue grab_batch_with_minimum_allocations"
    ),
    "atroposlib.cli.run_api": "main",
    "atroposlib.cli.sft": "main",
    "atroposlib.cli.dpo": "main",
    "atroposlib.cli.view_run": "main",
    "atroposlib.cli.view_run_multimodal": "main",
    "atroposlib.cli.inference_node_wandb_watcher": "main",
    "atroposlib.envs": "BaseEnv BaseEnvConfig APIServerConfig ScoredDataGroup EvalHandlingEnum",
    "atroposlib.envs.base": (
        "BaseEnv BaseEnvConfig APIServerConfig ScoredDataGroup EvalHandlingEnum Item ScoredDataItem ServerBaseline "
        "APIServer ServerManager ServerManagerConfig ReasoningConfig Message UUID wandb generate_html OpenaiConfig"
    ),
    "atroposlib.envs.constants": "ENV_NAMESPACE OPENAI_NAMESPACE SERVER_MANAGER_NAMESPACE NAMESPACE_SEP",
    "atroposlib.envs.eval": "EvalBase eval_runner evaluate_log pass_at_k",
    "atroposlib.envs.teacher_distillation_env": (
        "TeacherDistillationConfig TeacherDistillationEnv BaseEnv ServerManager resolve_openai_configs"
    ),
    "atroposlib.envs.reward_fns": "RewardFunction registry CombinedReward",
    "atroposlib.envs.reward_fns.registry": "registry RewardRegistry LegacyFunctionWrapper",
    "atroposlib.envs.reward_fns.reward_function": "RewardFunction",
    "atroposlib.envs.reward_fns.combined_reward": "CombinedReward",
    "atroposlib.envs.reward_fns.accuracy_reward": "AccuracyReward accuracy_reward",
    "atroposlib.envs.reward_fns.format_reward": "FormatReward format_reward",
    "atroposlib.envs.reward_fns.r1_reward": (
        "R1Reward FormatReasoningReward AccuracyXReward r1_reward format_reasoning_reward accuracy_reward"
    ),
    "atroposlib.envs.reward_fns.cascading_r1_math_reward": "cascading_r1_math_reward format_reward accuracy_reward",
    "atroposlib.envs.reward_fns.cosine_scaled_reward": "CosineScaledReward cosine_scaled_reward",
    "atroposlib.envs.reward_fns.crossword_format_reward": "CrosswordFormatReward crossword_format_reward",
    "atroposlib.envs.reward_fns.reasoning_steps_reward": "ReasoningStepsReward reasoning_steps_reward",
    "atroposlib.envs.reward_fns.repetition_penalty_reward": "RepetitionPenaltyReward repetition_penalty_reward",
    "atroposlib.envs.reward_fns.chandas_meter_reward": "ChandasMeterReward",
    "atroposlib.envs.server_handling.server_baseline": (
        "APIServerConfig ServerBaseline APIServer ReasoningConfig AsyncSemWithAdaptiveWeight VALID_REASONING_EFFORTS "
        "OpenaiConfig"
    ),
    "atroposlib.envs.server_handling.server_manager": (
        "ServerManager APIServerConfig ServerBaseline ServerManagerConfig APIServer"
    ),
    "atroposlib.envs.server_handling.openai_server": "OpenAIServer APIServerConfig resolve_openai_configs",
    "atroposlib.envs.server_handling.managed_server": (
        "ManagedServer DummyManagedServer ManagedServerAdapter SequenceNode"
    ),
    "atroposlib.envs.server_handling.vllm_server": "VLLMServer resolve_openai_configs",
    "atroposlib.envs.server_handling.sglang_server": "SGLangServer resolve_openai_configs",
    "atroposlib.envs.server_handling.trl_vllm_server": "TrlVllmServer AutoTokenizer aiohttp",
    "atroposlib.envs.server_handling.server_harness": "ServerHarness create_chat_completion create_completion",
    "atroposlib.envs.server_handling.tool_call_translator": "ToolCallTranslator VLLM_AVAILABLE",
    "atroposlib.envs.server_handling.managed_server_proxy": "create_app main",
    "atroposlib.envs.server_handling.proxy_client": "ProxyManagedServer create_proxy_session",
    "atroposlib.frontend.jsonl2html": "generate_html create_html_for_group get_score_class",
    "atroposlib.type_definitions": (
        "Content Item number UUID Message AgentStep AgentHistory Observation GameStep GameHistory "
        "EvaluationConfigGeneral EvaluationResults EvaluationMetrics EvaluationSample"
    ),
    "atroposlib.utils.tokenize_for_trainer": "tokenize_for_trainer tokenize_for_trainer_dpo UNMASKED_ROLES",
    "atroposlib.utils.tool_call_parser": "parse_tool_call extract_tool_call",
    "atroposlib.utils.message_history_utils": "strip_thinking truncate_thinking ensure_trajectory_token_limit",
    "atroposlib.utils.best_of_n_selection": "select_best_index",
    "atroposlib.utils.io": "parse_http_response",
    "atroposlib.utils.metrics": "get_std_min_max_avg",
    "atroposlib.utils.display": "display_metrics_table",
    "atroposlib.utils.advantages": (
        "allclose_to_first compute_stats compute_discounted_returns compute_grpo_process_supervision_advantages"
    ),
    "atroposlib.utils.cli": (
        "get_prefixed_pydantic_model merge_dicts extract_namespace adjust_model_defaults get_double_dash_flags"
    ),
    "atroposlib.utils.force_diverse_samples": "generate_with_diverse_first_tokens",
    "atroposlib.utils.tokenizers.qwen_fixed_tokenizer": "QwenFixedTokenizer",
    "atroposlib.environments.eval_environments.eval_helpers": (
        "HERMES_REASONING_PROMPT HERMES_REASONING_PROMPT_WITH_ANSWER extract_reasoning_from_completion "
        "extract_reasoning_from_response"
    ),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("module", "names"), IMPORTS.items(), ids=IMPORTS)
def test_names_can_be_imported(module, names):
    imported = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(imported, name)] == []


HANDLING = "atroposlib.envs.server_handling"
REWARDS = "atroposlib.envs.reward_fns"
BASE_ENV = "atroposlib.envs.base:BaseEnv"

SIGNATURES = {
    f"{BASE_ENV}.__init__": "self config server_configs slurm=False testing=False",
    f"{BASE_ENV}.collect_trajectory": "self item",
    f"{BASE_ENV}.collect_trajectories": "self item",
    f"{BASE_ENV}.postprocess_histories": "self trajectories",
    f"{BASE_ENV}.get_next_item": "self",
    f"{BASE_ENV}.setup": "self",
    f"{BASE_ENV}.setup_wandb": "self",
    f"{BASE_ENV}.register_env": "self",
    f"{BASE_ENV}.get_server_info": "self",
    f"{BASE_ENV}.get_status": "self",
    f"{BASE_ENV}.env_step_checks": "self",
    f"{BASE_ENV}.add_train_workers": "self",
    f"{BASE_ENV}.env_manager": "self",
    f"{BASE_ENV}.process_manager": "self",
    f"{BASE_ENV}._run_evaluate": "self",
    f"{BASE_ENV}.cleanup": "self",
    f"{BASE_ENV}.load_checkpoint": "self",
    f"{BASE_ENV}.save_checkpoint": "self step data=None",
    f"{BASE_ENV}.perf_stats": "self metrics_dict",
    f"{BASE_ENV}.create_rollout_table": "self wandb_metrics",
    f"{BASE_ENV}.add_rollouts_for_wandb": "self scored_data item=None",
    f"{BASE_ENV}.wandb_log": "self wandb_metrics=None",
    f"{BASE_ENV}.handle_env": "self item_uuid",
    f"{BASE_ENV}.handle_send_to_api": (
        "self scored_data item=None do_send_to_api=True abort_on_any_max_length_exceeded=True"
    ),
    f"{BASE_ENV}.evaluate_log": (
        "self metrics task_name=None model_name=None start_time=None end_time=None generation_parameters=None "
        "samples=None verbose=True"
    ),
    "atroposlib.envs.eval:evaluate_log": (
        "metrics eval_dir=None task_name=None model_name=None start_time=None end_time=None "
        "generation_parameters=None samples=None verbose=True"
    ),
    "atroposlib.envs.eval:pass_at_k": "m c k",
    "atroposlib.envs.eval:EvalBase.__init__": "self pass_at_n=1 pass_at_n_samples=1",
    "atroposlib.envs.eval:EvalBase.chat_completion": "self server messages",
    "atroposlib.envs.eval:EvalBase.run_item": "self server data_item",
    "atroposlib.envs.eval:eval_runner": "eval_env",
    "atroposlib.envs.teacher_distillation_env:TeacherDistillationEnv.__init__": (
        "self config server_configs teacher_server_configs=None slurm=False testing=False"
    ),
    f"{HANDLING}.server_baseline:APIServer.__init__": "self config reasoning_config=None",
    f"{HANDLING}.server_baseline:AsyncSemWithAdaptiveWeight.__init__": "self value",
    f"{HANDLING}.server_baseline:ReasoningConfig.__init__": "self enabled=False effort=None max_tokens=None",
    f"{HANDLING}.server_baseline:ReasoningConfig.build_extra_body": "self base_url=None use_max_tokens=False",
    f"{HANDLING}.server_manager:ServerManager.managed_server": (
        "self tokenizer=None base_url=None preserve_think_blocks=False"
    ),
    f"{HANDLING}.server_manager:ServerManager.wait_for_sem": "self is_training",
    f"{HANDLING}.server_manager:ServerManager.update_weight": "self weight",
    f"{HANDLING}.managed_server:ManagedServer.__init__": (
        "self server tokenizer=None track_tree=False tool_parser=None preserve_think_blocks=False"
    ),
    f"{HANDLING}.managed_server:DummyManagedServer.__init__": "self server tokenizer=None track_tree=False",
    f"{HANDLING}.managed_server:ManagedServerAdapter.__init__": "self managed_server base_url",
    f"{HANDLING}.openai_server:resolve_openai_configs": (
        "default_server_configs openai_config_dict yaml_config cli_passed_flags logger=None"
    ),
    f"{HANDLING}.server_harness:create_chat_completion": "resp n=1 finish_reason='stop'",
    f"{HANDLING}.server_harness:create_completion": "resp n=1 finish_reason='stop'",
    f"{HANDLING}.server_harness:ServerHarness.set_desired_response": "self input_message desired_response",
    f"{HANDLING}.server_harness:ServerHarness.set_desired_completion": "self input_message completion",
    f"{HANDLING}.server_harness:ServerHarness.set_tokens_and_logprobs_response": (
        "self prompt prompt_tokens output_tokens_list output_logprobs_list finish_reasons"
    ),
    f"{HANDLING}.tool_call_translator:ToolCallTranslator.__init__": "self tokenizer parser_name='hermes'",
    f"{HANDLING}.tool_call_translator:ToolCallTranslator.parse_model_output": (
        "self raw_text tool_choice=None tools=None"
    ),
    f"{HANDLING}.managed_server_proxy:create_app": "server_manager tokenizer model_name='unknown'",
    f"{HANDLING}.proxy_client:ProxyManagedServer.__init__": (
        "self proxy_url session_uuid model_name='unknown' base_url=None"
    ),
    f"{HANDLING}.proxy_client:create_proxy_session": (
        "proxy_url base_url=None tool_parser='hermes' track_tree=False model_name='unknown'"
    ),
    f"{REWARDS}.reward_function:RewardFunction.__init__": "self weight=1.0 name=None",
    f"{REWARDS}.registry:RewardRegistry.register": "self cls=None name=None",
    f"{REWARDS}.registry:RewardRegistry.register_function": "self name function",
    f"{REWARDS}.registry:RewardRegistry.create": "self name_or_config",
    f"{REWARDS}.combined_reward:CombinedReward.__init__": "self rewards normalization='none' weight=1.0",
    f"{REWARDS}.accuracy_reward:AccuracyReward.__init__": (
        "self tolerance=1e-06 split_on_think_tag=True max_boxed_threshold=6 weight=1.0"
    ),
    f"{REWARDS}.format_reward:FormatReward.__init__": (
        "self preferred_tags=None require_all_tags=False case_sensitive=False weight=1.0"
    ),
    f"{REWARDS}.r1_reward:R1Reward.__init__": "self format_weight=0.5 accuracy_weight=1.0 weight=1.0",
    f"{REWARDS}.r1_reward:FormatReasoningReward.__init__": (
        "self reward_value=0.5 require_thinking=True require_response=True allow_multiple_thinking=False weight=1.0"
    ),
    f"{REWARDS}.r1_reward:AccuracyXReward.__init__": (
        "self exact_match=False case_sensitive=False reward_value=1.0 weight=1.0"
    ),
    f"{REWARDS}.cosine_scaled_reward:CosineScaledReward.__init__": (
        "self model_name=None scale_factor=1.0 min_reward=-1.0 max_reward=1.0 default_reward=0.0 weight=1.0"
    ),
    f"{REWARDS}.reasoning_steps_reward:ReasoningStepsReward.__init__": (
        "self min_words=10 min_steps=3 base_score=0.1 pattern_weights=None weight=1.0"
    ),
    f"{REWARDS}.repetition_penalty_reward:RepetitionPenaltyReward.__init__": (
        "self threshold=0.05 min_words=10 min_sentences=2 short_text_penalty=-0.1 "
        "paragraph_repetition_base_penalty=-0.6 component_weights=None stopwords=None weight=1.0"
    ),
    f"{REWARDS}.crossword_format_reward:CrosswordFormatReward.__init__": (
        "self format_patterns=None reward_value=1.0 penalize_invalid_chars=True "
        "valid_chars='ABCDEFGHIJKLMNOPQRSTUVWXYZ' weight=1.0"
    ),
    f"{REWARDS}.chandas_meter_reward:ChandasMeterReward.__init__": "self meter='tristubh' weight=1.0",
    "atroposlib.utils.tokenize_for_trainer:tokenize_for_trainer": (
        "tokenizer chat include_messages=False train_on_all_assistant_turns=False finish_reason=''"
    ),
    "atroposlib.utils.tool_call_parser:parse_tool_call": "response available_tools=None preferred_tags=None",
    "atroposlib.utils.tool_call_parser:extract_tool_call": "text preferred_tags=None",
    "atroposlib.utils.message_history_utils:truncate_thinking": "response_text tokenizer max_think_tokens",
    "atroposlib.utils.message_history_utils:ensure_trajectory_token_limit": (
        "trajectory tokenizer max_trajectory_tokens"
    ),
    "atroposlib.utils.best_of_n_selection:select_best_index": (
        "primary_scores secondary_scores primary_higher_is_better=True secondary_lower_is_better=True"
    ),
    "atroposlib.utils.io:parse_http_response": "resp logger=None",
    "atroposlib.utils.metrics:get_std_min_max_avg": "name data metrics_dict",
    "atroposlib.utils.display:display_metrics_table": "task_name metrics start_time end_time",
    "atroposlib.utils.advantages:allclose_to_first": (
        "values rtol=1e-05 atol=1e-08 equal_nan=False return_vector=False"
    ),
    "atroposlib.utils.advantages:compute_discounted_returns": "rewards gamma",
    "atroposlib.utils.advantages:compute_grpo_process_supervision_advantages": "rewards gamma=None std_tol=1e-08",
    "atroposlib.utils.force_diverse_samples:generate_with_diverse_first_tokens": (
        "self messages prefill='' n=8 max_tokens=4096 temperature=1.0"
    ),
    "atroposlib.utils.cli:get_prefixed_pydantic_model": "base_model prefix",
    "atroposlib.utils.cli:extract_namespace": "model prefix",
    "atroposlib.utils.cli:adjust_model_defaults": "model_class defaults",
    "atroposlib.utils.cli:get_double_dash_flags": "",
    "atroposlib.api.utils:find_groups_summing_to_target": "buffer target_size",
    "atroposlib.api.utils:grab_exact_from_heterogeneous_queue": "queue batch_size",
    "atroposlib.api.utils:grab_batch_with_minimum_allocations": "queue batch_size env_configs",
}

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find(path):
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def written(parameter):
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("path", "pinned"), SIGNATURES.items(), ids=SIGNATURES)
def test_parameters_keep_names_order_and_defaults(path, pinned):
    named = [p for p in inspect.signature(find(path)).parameters.values() if p.kind not in VARIADIC]
    expected = pinned.split()
    assert [written(parameter) for parameter in named[: len(expected)]] == expected
    assert [p.name for p in named[len(expected) :] if p.default is p.empty] == []


DEFAULTS = {
    "atroposlib.envs.base:BaseEnvConfig": {
        "group_size": 4,
        "max_num_workers": -1,
        "max_eval_workers": 16,
        "max_num_workers_per_node": 8,
        "steps_per_eval": 100,
        "max_token_length": 2048,
        "eval_limit_ratio": 0.5,
        "inference_weight": 1.0,
        "batch_size": -1,
        "max_batches_offpolicy": 3,
        "tokenizer_name": "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        "use_wandb": True,
        "rollout_server_url": "http://localhost:8000",
        "total_steps": 1000,
        "wandb_name": None,
        "num_rollouts_to_keep": 32,
        "num_rollouts_per_group_for_logging": 1,
        "ensure_scores_are_not_same": True,
        "data_path_to_save_groups": None,
        "data_dir_to_save_evals": None,
        "min_items_sent_before_logging": 2,
        "include_messages": False,
        "min_batch_allocation": None,
        "worker_timeout": 600,
        "thinking_mode": False,
        "reasoning_effort": None,
        "max_reasoning_tokens": None,
        "custom_thinking_prompt": None,
    },
    f"{HANDLING}.server_baseline:ServerBaseline": {
        "timeout": 1200,
        "num_max_requests_at_once": 512,
        "num_requests_for_eval": 64,
        "model_name": "default",
        "rolling_buffer_length": 1000,
        "server_type": "openai",
        "tokenizer_name": "none",
    },
    f"{HANDLING}.server_baseline:APIServerConfig": {
        "api_key": "",
        "base_url": "",
        "n_kwarg_is_ignored": False,
        "health_check": True,
        "timeout": 1200,
    },
    f"{HANDLING}.server_manager:ServerManagerConfig": {
        "slurm": False,
        "testing": False,
        "max_n_completions": 8,
        "proxy_url": None,
    },
    "atroposlib.envs.teacher_distillation_env:TeacherDistillationConfig": {
        "teacher_enabled": False,
        "teacher_top_k": 0,
        "group_size": 4,
    },
}


@pytest.mark.parametrize(("path", "defaults"), DEFAULTS.items(), ids=DEFAULTS)
def test_settings_keep_their_defaults_and_ignore_unknown_names(path, defaults):
    settings = find(path)(no_such_setting=1)
    assert {name: getattr(settings, name) for name in defaults} == defaults


def test_the_server_manager_keeps_its_parameters():
    parameters = inspect.signature(find(f"{HANDLING}.server_manager:ServerManager")).parameters
    assert list(parameters)[:9] == [
        "configs",
        "server_class",
        "slurm",
        "testing",
        "max_n_completions",
        "reasoning_config",
        "proxy_url",
        "use_proxy",
        "tool_parser",
    ]
    assert parameters["max_n_completions"].default == 8
    assert parameters["server_class"].default is find(f"{HANDLING}.server_baseline:APIServer")


def test_constants_keep_their_values():
    constants = importlib.import_module("atroposlib.envs.constants")
    assert (constants.ENV_NAMESPACE, constants.OPENAI_NAMESPACE) == ("env", "openai")
    assert (constants.SERVER_MANAGER_NAMESPACE, constants.NAMESPACE_SEP) == ("server", ".")
    assert {e.name: e.value for e in find("atroposlib.envs.base:EvalHandlingEnum")} == {
        "STOP_TRAIN": "STOP_TRAIN",
        "LIMIT_TRAIN": "LIMIT_TRAIN",
        "NONE": "NONE",
    }
    assert set(find(f"{HANDLING}.server_baseline:VALID_REASONING_EFFORTS")) == {
        "none",
        "minimal",
        "low",
        "medium",
        "high",
        "xhigh",
    }
    assert find("atroposlib.utils.tokenize_for_trainer:UNMASKED_ROLES") == ["assistant", "agent"]


@pytest.mark.parametrize("module", ["atroposlib.envs.base", f"{HANDLING}.server_baseline"])
def test_the_old_name_of_the_server_config_is_an_alias(module):
    assert find(f"{module}:OpenaiConfig") is find(f"{module}:APIServerConfig")


CLASS_ATTRIBUTES = {"name": None, "env_config_cls": "BaseEnvConfig", "server_cls": "APIServer"}


@pytest.mark.parametrize(("attribute", "expected"), CLASS_ATTRIBUTES.items())
def test_class_attributes_of_the_environment(attribute, expected):
    value = getattr(find(BASE_ENV), attribute)
    assert (value.__name__ if expected else value) == expected


CLASSMETHODS = [
    "cli",
    "config_init",
    "get_cli_serve_config_cls",
    "get_cli_process_config_cls",
    "get_cli_evaluate_config_cls",
]


@pytest.mark.parametrize("name", CLASSMETHODS)
def test_class_methods_of_the_environment(name):
    assert inspect.ismethod(getattr(find(BASE_ENV), name))


def test_the_batch_size_an_environment_can_count_on_is_a_property():
    assert isinstance(inspect.getattr_static(find(BASE_ENV), "derived_batch_size"), property)
