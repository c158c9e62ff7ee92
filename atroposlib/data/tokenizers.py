"""Tokenizers by name, and what datasets need of them.

A tokenizer is a local Hugging Face folder, a `.gguf` file or the name of an embedded model (whose own tokenizer is
taken), or a name on the Hugging Face hub.
"""

import contextlib
import functools
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from atroposlib.data.rollout_files import expand_input
from atroposlib.errors import ModelError, RowError
from atroposlib.json_lines import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_HUB_WAIT_S = 1.0


def load_tokenizer(spec: str) -> "PreTrainedTokenizerBase":
    """The tokenizer that `spec` names, with `plain_chat_ids`.

    Raises:
        ModelError: there is none, in words that say what was tried.
    """
    folder = tokenizer_folder(spec)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch, which nobody needs here
    has_hub = folder is None and _hub_answers()
    try:
        tokenizer = _loader(folder)(str(folder or spec), local_files_only=not has_hub)
    except Exception as error:  # transformers raises many kinds; all mean that this tokenizer cannot be had
        nowhere = (
            f"neither a folder here nor {'on the hub' if has_hub else 'in the cache, and the hub does not answer'}"
        )
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"tokenizer {spec}: {'not a tokenizer folder' if folder else nowhere} "
            f"({first}); give a folder with tokenizer.json and tokenizer_config.json, a .gguf file, or a hub name"
        ) from error
    return plain_chat_ids(tokenizer)


def _loader(folder: Path | None) -> "Callable[..., PreTrainedTokenizerBase]":
    """Return `from_pretrained` of its class. 1 to 2 s; only commands that need a tokenizer pay for it.

    `AutoTokenizer` imports torch, where it is installed, for 3 s more. It finds the same class for a folder that names
    the plain one and no kind of model.
    """
    if folder is not None:
        tokenizer, model = (read_object(folder / name) or {} for name in ("tokenizer_config.json", "config.json"))
        is_plain = tokenizer.get("tokenizer_class") == "PreTrainedTokenizerFast" and "auto_map" not in tokenizer
        if is_plain and "model_type" not in model:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


def _hub_answers() -> bool:
    """Return whether the model hub can be reached, found out within a second; with a proxy it is left to be tried."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return not constants.HF_HUB_OFFLINE
    place = urlsplit(constants.ENDPOINT)
    answered = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((place.hostname, place.port or 443), _HUB_WAIT_S):
            answered.set()

    looking = threading.Thread(target=connect, name="model hub", daemon=True)  # resolving a name knows no time limit
    looking.start()
    looking.join(_HUB_WAIT_S)
    return answered.is_set()


def plain_chat_ids(tokenizer: T) -> T:
    """Make `apply_chat_template` give a list of ids unless `return_dict` is passed, as in transformers 4.

    Version 5 gives a BatchEncoding, which environments written before store as if it were the ids. The object stays
    the same; its class becomes a subclass of the same name. What is no Hugging Face tokenizer is left as it is.
    """
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        tokenizer.__class__ = _with_plain_chat_ids(type(tokenizer))
    return tokenizer


def padded_vocabulary(spec: str) -> int | None:
    """The ids that a model has embeddings for, from its `config.json` on this machine; None: unknown.

    The file lies next to the tokenizer, or in the hub's cache.
    """
    folder = tokenizer_folder(spec)
    path = folder / "config.json" if folder else cached_file(spec, "config.json")
    config = (read_object(path) if path else None) or {}
    sizes = (config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size"))
    return next((size for size in sizes if isinstance(size, int)), None)


def check_ids(ids: list[int], vocabulary_size: int, where: str) -> None:
    """RowError when an id lies outside the tokenizer's vocabulary: the ids are another model's."""
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary_size):
        wrong = next(token for token in ids if not 0 <= token < vocabulary_size)
        raise RowError(
            where,
            "id outside the tokenizer's vocabulary",
            f"token id {wrong} is outside the tokenizer's {vocabulary_size} ids; "
            "give --tokenizer the tokenizer of the model that generated these rollouts",
        )


def tokenizer_folder(spec: str) -> Path | None:
    """The local folder of `spec`; None when it can only be a hub name."""
    path = expand_input(spec, what="--tokenizer")
    if path.is_dir():
        return path
    if path.suffix == ".gguf" or not ("/" in spec or path.exists()):
        from atroposlib_engine.models import resolve_model

        try:
            return resolve_model(spec).tokenizer_dir
        except ModelError:
            if path.suffix == ".gguf":
                raise
    return None


def cached_file(name: str, file: str) -> Path | None:
    """A file of a hub model in the local cache; None when it is not there, or `name` is no name of the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


class _PlainChatIds:
    """Put in front of a tokenizer's class by `_with_plain_chat_ids`."""

    def apply_chat_template(self, *args: object, **kwargs: object) -> object:
        """As the tokenizer's own, but ids come as a list (or tensor) unless `return_dict` is given."""
        result = super().apply_chat_template(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return result["input_ids"] if "return_dict" not in kwargs and isinstance(result, Mapping) else result

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Pickle under the tokenizer's own class, which other processes can import."""
        _, (_, *rest), *state = super().__reduce_ex__(protocol)  # pyright: ignore[reportAssignmentType]
        return (_unpickled, (type(self).__mro__[2], *rest), *state)


def _unpickled(base: type, *arguments: object) -> object:
    made = _with_plain_chat_ids(base)
    return made.__new__(made, *arguments)


@functools.cache
def _with_plain_chat_ids(base: type) -> type:
    if issubclass(base, _PlainChatIds):
        return base
    names = {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (_PlainChatIds, base), names)
