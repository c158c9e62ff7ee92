"""The text of token ids, by the tokenizer of the run that they are of, loaded while the page is already shown."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from atroposlib.data.tokenizers import load_tokenizer, tokenizer_folder
from atroposlib.errors import AtroposError
from atroposlib.type_definitions import JsonObject
from atroposlib.yaml_files import read_mapping

logger = logging.getLogger(__name__)

Decode = Callable[[list[int]], str]
State = Literal["loading", "ready", "failed"]
_BROKEN = "\ufffd"
_LONGEST_CHARACTER = 8  # tokens


class TokenTexts:
    """Tokenizers by the name or folder that stands for them; each is loaded once, by a thread."""

    def __init__(self, spec: str | None = None) -> None:
        """`spec`: of all files; None: that of their run."""
        self._spec = spec
        self._of_folder: dict[Path, str | None] = {}
        self._loaded: dict[str, Decode | str] = {}  # a text says why there is none
        self._loading: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()

    def spec_of(self, path: Path, record: JsonObject) -> str | None:
        """The tokenizer of a rollout file: the one given, that of the run's settings, or that of the engine's model."""
        if self._spec:
            return self._spec
        folder = path.parent
        if folder not in self._of_folder:
            self._of_folder[folder] = _spec_of_run(folder) if path.exists() else None  # a running API is no file
        engine = record.get("engine")
        model = engine.get("model") if isinstance(engine, dict) else None
        is_name = isinstance(model, str) and "/" in model  # of an embedded model the settings name the folder
        return self._of_folder[folder] or (model if is_name else None)

    def texts(self, spec: str | None, ids: list[int]) -> tuple[list[str] | None, str]:
        """The text of each id, or None and why: it is being loaded, or cannot be had."""
        if spec is None:
            return None, "no tokenizer is known; give --tokenizer"
        with self._lock:
            if spec not in self._loading:
                self._loading[spec] = threading.Thread(target=self._load, args=(spec,), name="tokenizer", daemon=True)
                self._loading[spec].start()
        decode = self._loaded.get(spec)
        if decode is None:
            return None, "loading"
        if isinstance(decode, str):
            return None, decode
        try:
            return pieces(decode, ids), ""
        except (ValueError, OverflowError, TypeError) as error:
            return None, f"tokenizer {spec}: {error}; are these the ids of another model?"

    def _load(self, spec: str) -> None:
        try:
            self._loaded[spec] = _decoder(spec)
        except Exception as error:  # of a library; the page shows ids instead
            logger.warning("%s", error)
            self._loaded[spec] = str(error)


def pieces(decode: Decode, ids: list[int]) -> list[str]:
    """The text of each id; of a character made of several tokens all stands with the last of them."""
    found: list[str] = []
    start = 0
    for at in range(len(ids)):
        text = decode(ids[start : at + 1])
        if text.endswith(_BROKEN) and at + 1 < len(ids) and at - start < _LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(text)
        start = at + 1
    return found


def _decoder(spec: str) -> Decode:
    """A folder's `tokenizer.json` needs no transformers, which takes a second to import."""
    folder = tokenizer_folder(spec)
    if folder is not None and (folder / "tokenizer.json").is_file():
        import tokenizers

        fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda ids: fast.decode(ids, skip_special_tokens=False)
    slow = load_tokenizer(spec)
    return lambda ids: str(slow.decode(ids, clean_up_tokenization_spaces=False))


def _spec_of_run(folder: Path) -> str | None:
    """The tokenizer that the settings next to rollout files name; None where there are none."""
    for path in sorted(folder.glob("*.config.yaml")):
        try:
            env = read_mapping(path, expected="settings", what="settings of a run").get("env")
        except AtroposError:
            continue
        name = env.get("tokenizer_name") if isinstance(env, dict) else None
        if isinstance(name, str) and name:
            return name
    return None
