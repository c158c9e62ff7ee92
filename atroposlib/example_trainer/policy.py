"""The model in training: loading, LoRA, log-probabilities of given tokens, and its frozen reference."""

import copy
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from atroposlib.data.tokenizers import plain_chat_ids
from atroposlib.errors import ConfigError, DataError, ModelError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.data import TrainingRow
from atroposlib.example_trainer.exports import model_folder
from atroposlib.example_trainer.layout import MicroBatch
from atroposlib.example_trainer.token_scores import (
    CausalModel,
    TokenScores,
    can_compile,
    require_known_logits,
    token_scores,
)
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PEFT_NAMES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "layers_to_transform": "lora_layer_indices",
}
"""Settings that make an adapter, and stay as they were at the run's first start: peft's name to ours."""
_LAYER = re.compile(r"\.(\d+)\.")


class Policy:
    """Weights, tokenizer and device. Master weights are float32; with LoRA the frozen ones are in the compute dtype."""

    def __init__(self, config: TrainingConfig, *, checkpoint: Path | None = None) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(config.dtype, self.device)
        self.folder = model_folder(config.model_name)
        self.tokenizer = load_tokenizer(self.folder)
        self.model = _load(self, checkpoint).to(self.device)
        self._copies: dict[str, Tensor] = {}  # page-locked, see `_off_gpu`
        self._reference: nn.Module | None = None
        if config.init_kl_coeff > 0 and not config.use_lora:
            start = self.model if checkpoint is None else _load_weights(self.folder, torch.float32)
            self._reference = copy.deepcopy(start).to(self.device, self.dtype).eval().requires_grad_(False)
        require_known_logits(self.bare, training=config.lora_dropout == 0)
        self.model.train()
        if compiles(config, self.device):
            compile_layers(self.bare)
            if self._reference is not None:
                compile_layers(self._reference)

    @property
    def bare(self) -> CausalModel:
        """The Hugging Face model, which an adapter's layers are already in."""
        return self.model.get_base_model() if self.config.use_lora else self.model  # pyright: ignore[reportCallIssue]

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters the optimizer moves."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def require_known_tokens(self, rows: Sequence[TrainingRow]) -> None:
        """DataError for a token that the model has no embedding of, as of another tokenizer's."""
        known = self.bare.get_input_embeddings().num_embeddings
        for row in rows:
            for ids in (row.tokens, row.teacher_ids):
                if ids is not None and len(odd := ids[(ids < 0) | (ids >= known)]):
                    raise DataError(
                        f"a sequence of group {row.group} has token {odd[0]}, and the model knows 0 to {known - 1}; "
                        "the environment must use the tokenizer of the model in training"
                    )

    def score(self, micro: MicroBatch, *, entropy: bool = False, teacher: bool = False) -> TokenScores:
        """Log-probabilities of the targets (and of what a teacher named) under the trained weights, with gradient."""
        return self._score(self.model, micro, entropy, teacher)

    @torch.no_grad()
    def reference_logp(self, micro: MicroBatch) -> Tensor:
        """[B,T] log-probabilities under the model as it was at the start of the run."""
        if self._reference is not None:
            return self._score(self._reference, micro, False).logp
        if not self.config.use_lora:
            raise ConfigError("the reference model is not loaded, because init_kl_coeff is 0; set it above 0")
        self.model.eval()
        try:
            with self.model.disable_adapter():  # pyright: ignore[reportCallIssue]
                return self._score(self.model, micro, False).logp
        finally:
            self.model.train()

    def merged_state(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """All weights on the CPU, named as in the Hugging Face model; an adapter is added in, in float32.

        From a GPU and without an adapter they come in the same memory every time: the next call overwrites them.
        """
        if not self.config.use_lora:
            if self.device.type == "cuda":
                return self._off_gpu(self.model.state_dict(), dtype)
            return {name: value.detach().to(dtype, copy=True) for name, value in self.model.state_dict().items()}
        from peft.tuners.lora import LoraLayer

        base = self.bare
        state = {name: value.detach().cpu() for name, value in base.state_dict().items()}
        state = {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}
        for name, module in base.named_modules():
            if isinstance(module, LoraLayer):
                delta = module.get_delta_weight("default")  # pyright: ignore[reportAttributeAccessIssue]
                state[f"{name}.weight"] = state[f"{name}.weight"].float() + delta.detach().float().cpu()
        return {name: value.to(dtype) for name, value in state.items()}

    def _off_gpu(self, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies in page-locked memory, which a GPU writes at full speed and which is claimed once."""
        for name, value in state.items():
            if name not in self._copies or self._copies[name].dtype != dtype:
                self._copies[name] = torch.empty(value.shape, dtype=dtype, pin_memory=True)
            self._copies[name].copy_(value.detach().to(dtype), non_blocking=True)  # cast first: half the bytes
        torch.cuda.synchronize(self.device)
        return self._copies

    def save_merged(self, folder: Path) -> None:
        """A folder that `from_pretrained` and inference servers load, weights in the compute dtype."""
        state = self.merged_state(self.dtype)
        self.bare.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)

    def _score(self, model: CausalModel, micro: MicroBatch, entropy: bool, teacher: bool = False) -> TokenScores:
        bare = model.get_base_model() if self.config.use_lora else model
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return token_scores(bare, micro, entropy=entropy, teacher=teacher)


def pick_device(name: str) -> torch.device:
    """`auto` is this rank's GPU when there is one."""
    if name == "auto":
        gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        return torch.device(gpu if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r} but torch sees no GPU; use cpu or auto, or install torch with CUDA")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def load_tokenizer(folder: Path | str) -> "PreTrainedTokenizerBase":
    """The model's own tokenizer.

    Raises:
        ConfigError: there is none; it is what is loaded first, so the name is the likely cause.
    """
    from transformers import AutoTokenizer

    try:
        return plain_chat_ids(AutoTokenizer.from_pretrained(folder))
    except Exception as error:  # transformers raises many kinds; all mean that this tokenizer cannot be had
        raise ConfigError(
            f"model_name is {str(folder)!r}, which is neither a model's folder with a tokenizer nor can it be "
            f"downloaded: {' '.join(str(error).split())[:300]}; give a folder, a hub name or smollm2-135m"
        ) from error


def shares_prompts(config: TrainingConfig, model: CausalModel) -> bool:
    """Return True when rows may share a line: as asked for, and where every token sees all that its row has before it.

    The mask of such a line is used as it is by sdpa alone, and windows and recurrent layers pay no heed to it.
    """
    text = model.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or [])
    attends = layers <= {"full_attention", "sliding_attention", "chunked_attention"} and not model._is_stateful
    windows = [getattr(text, name, None) or config.seq_len for name in ("sliding_window", "attention_chunk_size")]
    by_position = not getattr(text, "alibi", False)  # of Falcon, by the place in the line
    plain = model.config._attn_implementation == "sdpa" and attends and by_position and min(windows) >= config.seq_len
    if config.share_prompts and not plain:
        logger.warning("share_prompts is off: the attention of %s is not full, or not sdpa", config.model_name)
    return config.share_prompts and plain


def compiles(config: TrainingConfig, device: torch.device) -> bool:
    """True where the decoder's layers are compiled: as asked for, else where it was measured to pay."""
    if config.compile_layers is None:
        return can_compile(device) and not (config.use_lora or config.gradient_checkpointing)
    return config.compile_layers


def compile_layers(model: CausalModel) -> None:
    """Compile every decoder layer in place. One compilation serves all layers, and all sizes of their input."""
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=len):
        layer.compile(dynamic=True)


def adapter_settings(config: TrainingConfig) -> JsonObject:
    """The values of `PEFT_NAMES`, under peft's names."""
    layers = config.lora_layer_indices
    return {
        **{peft: getattr(config, ours) for peft, ours in PEFT_NAMES.items()},
        "target_modules": sorted(config.lora_target_modules),
        "layers_to_transform": sorted(layer_indices(layers)) if layers else None,
    }


def layer_indices(text: str) -> set[int]:
    """`"0-3,28"` -> {0, 1, 2, 3, 28}."""
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise ConfigError(f"layer indices are {text!r}; expected numbers and ranges such as 0-3,28-31")
        found.update(range(int(low), int(high or low) + 1))
    return found


def _load(policy: Policy, checkpoint: Path | None) -> nn.Module:
    """Base model, then adapter, frozen layers and checkpointing as configured."""
    config = policy.config
    if config.use_lora:
        model = _with_adapter(config, _load_weights(policy.folder, policy.dtype), checkpoint)
    else:
        model = _load_weights(checkpoint or policy.folder, torch.float32)
    if config.train_layer_indices:
        _freeze_other_layers(model, layer_indices(config.train_layer_indices))
    if config.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # the first name is transformers 5's
        model.enable_input_require_grads()
    return model


def _load_weights(folder: Path | str, dtype: torch.dtype) -> CausalModel:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder)
        for settings in (vars(config), vars(config.get_text_config())):  # no dropout: engines have none
            settings.update((key, 0.0) for key in [*settings] if "drop" in key and isinstance(settings[key], float))
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"model {str(folder)!r} cannot be loaded: {error}") from error


def _with_adapter(config: TrainingConfig, base: CausalModel, checkpoint: Path | None) -> CausalModel:
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from safetensors import SafetensorError

    if checkpoint is not None:
        try:
            return PeftModel.from_pretrained(base, checkpoint, is_trainable=True)
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"adapter {str(checkpoint)!r} cannot be loaded: {error}") from error
    adapter = LoraConfig(task_type="CAUSAL_LM", **adapter_settings(config))
    try:
        model = get_peft_model(base, adapter)
    except ValueError as error:
        raise ConfigError(f"lora_target_modules is {config.lora_target_modules}: {error}") from error
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if isinstance(embedding, BaseTunerLayer) or (isinstance(head, BaseTunerLayer) and embedding.weight is head.weight):
        raise ConfigError(
            f"lora_target_modules is {config.lora_target_modules}: engines take no adapter of an embedding, nor of an "
            "output layer that is one; leave it out"
        )
    return model


def _freeze_other_layers(model: nn.Module, kept: set[int]) -> None:
    found: set[int] = set()
    for name, parameter in model.named_parameters():
        match = _LAYER.search(name)
        index = int(match[1]) if match else None
        found |= {index} if index is not None else set()
        parameter.requires_grad_(parameter.requires_grad and index in kept)
    if not kept <= found:
        raise ConfigError(f"train_layer_indices names layer {max(kept)}; the model has layers {sorted(found)}")
