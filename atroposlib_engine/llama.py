"""llama.cpp's C interface, as far as continuous batching needs it, out of the xllamacpp wheel.

xllamacpp's own server drops the ids and log-probabilities of tokens that end inside a UTF-8 character, gives
log-probabilities of the raw distribution only, and none for the prompt. The C interface gives logits, from which
everything follows exactly, so the engine decodes through it.

Parameter structs differ between releases of llama.cpp. Only the four leading fields of the context parameters are
written; their defaults are checked before and the result is read back after, so a changed layout is an error with a
sentence and never a wrong number.
"""

import ctypes as c
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from atroposlib.errors import ModelError

logger = logging.getLogger(__name__)

_KNOWN_DEFAULTS = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1}
_LOG_ERROR = 4
_NO_TOKEN = -1
MAX_BATCH_TOKENS = 512


class _ModelParams(c.Structure):
    """Passed through as it came; longer than any release's struct, of which the callee reads its own part."""

    _fields_ = (("opaque", c.c_uint64 * 64),)


class _ContextParams(c.Structure):
    _fields_ = (*((name, c.c_uint32) for name in _KNOWN_DEFAULTS), ("opaque", c.c_uint8 * 496))


class _Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.c_void_p),
        ("embd", c.c_void_p),
        ("pos", c.c_void_p),
        ("n_seq_id", c.c_void_p),
        ("seq_id", c.c_void_p),
        ("wanted", c.c_void_p),
    )


_LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_pointer, _int = c.c_void_p, c.c_int32
_SIGNATURES = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_LogCallback, _pointer]),
    "llama_model_default_params": (_ModelParams, []),
    "llama_context_default_params": (_ContextParams, []),
    "llama_model_load_from_file": (_pointer, [c.c_char_p, _ModelParams]),
    "llama_model_free": (None, [_pointer]),
    "llama_model_get_vocab": (_pointer, [_pointer]),
    "llama_model_n_ctx_train": (_int, [_pointer]),
    "llama_model_chat_template": (c.c_char_p, [_pointer, c.c_char_p]),
    "llama_init_from_model": (_pointer, [_pointer, _ContextParams]),
    "llama_free": (None, [_pointer]),
    "llama_n_ctx": (c.c_uint32, [_pointer]),
    "llama_n_ctx_seq": (c.c_uint32, [_pointer]),
    "llama_n_batch": (c.c_uint32, [_pointer]),
    "llama_n_seq_max": (c.c_uint32, [_pointer]),
    "llama_set_n_threads": (None, [_pointer, _int, _int]),
    "llama_decode": (_int, [_pointer, _Batch]),
    "llama_get_logits": (_pointer, [_pointer]),
    "llama_get_memory": (_pointer, [_pointer]),
    "llama_memory_seq_cp": (None, [_pointer, _int, _int, _int, _int]),
    "llama_memory_seq_rm": (c.c_bool, [_pointer, _int, _int, _int]),
    "llama_vocab_n_tokens": (_int, [_pointer]),
    "llama_vocab_eos": (_int, [_pointer]),
    "llama_vocab_eot": (_int, [_pointer]),
    "llama_vocab_bos": (_int, [_pointer]),
    "llama_token_to_piece": (_int, [_pointer, _int, c.c_char_p, _int, _int, c.c_bool]),
    "llama_tokenize": (_int, [_pointer, c.c_char_p, _int, _pointer, _int, c.c_bool, c.c_bool]),
}


def _load_library() -> c.CDLL:
    """The shared library inside the xllamacpp wheel, with typed functions."""
    try:
        import xllamacpp
    except ImportError as error:
        raise ModelError(
            "the embedded engine needs xllamacpp; install it with `pip install 'atroposlib[local]'`"
        ) from error
    folder = Path(str(xllamacpp.__file__)).parent
    library = c.CDLL(str(next(folder.glob("xllamacpp*.so"))))
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise ModelError(f"xllamacpp {xllamacpp.__version__} has no {name}; install xllamacpp 2026.10") from error
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_log, None)
    library.llama_backend_init()
    return library


@_LogCallback
def _log(level: int, text: bytes, _user_data: object) -> None:
    message = text.decode("utf-8", "replace").rstrip()
    if level == _LOG_ERROR and message:
        logger.error("llama.cpp: %s", message)


class Vocabulary:
    """Text to ids and back, as llama.cpp does it. Usable from any thread."""

    def __init__(self, library: c.CDLL, handle: int) -> None:
        self._library, self._handle = library, handle
        self._lock = threading.Lock()
        self.size: int = library.llama_vocab_n_tokens(handle)
        ends = (library.llama_vocab_eos(handle), library.llama_vocab_eot(handle))
        self.end_ids = frozenset(token for token in ends if token != _NO_TOKEN)
        self._plain = [self._piece(token, special=False) for token in range(self.size)]
        self._with_special = [self._piece(token, special=True) for token in range(self.size)]

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Ids of `text`; special tokens in it are parsed. `begin`: add a begin token where the model wants one."""
        raw = text.encode("utf-8")
        room = len(raw) + 2
        ids = np.empty(room, np.int32)
        with self._lock:
            count = self._library.llama_tokenize(self._handle, raw, len(raw), ids.ctypes.data, room, begin, True)
        return ids[:count].tolist()

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token; empty for a control token unless `special`."""
        return (self._with_special if special else self._plain)[token]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        pieces = self._with_special if special else self._plain
        return b"".join([pieces[token] for token in ids]).decode("utf-8", "replace")

    def rebind(self, handle: int) -> None:
        """Point at a newly loaded model of the same vocabulary."""
        with self._lock:
            self._handle = handle

    def _piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = c.create_string_buffer(room)
            written = self._library.llama_token_to_piece(self._handle, token, buffer, room, 0, special)
            if written >= 0:
                return buffer.raw[:written]
            room = -written


class Llama:
    """A loaded model with `slots` independent key-value sequences of `context` tokens each.

    Not thread-safe except `vocabulary`; one thread decodes.
    """

    def __init__(self, gguf: Path, *, slots: int, context: int, threads: int | None = None) -> None:
        self._library = _load_library()
        self.slots = slots
        self._requested_context = context
        self._threads = threads or len(os.sched_getaffinity(0))
        self._model = self._load(gguf)
        self.vocabulary = Vocabulary(self._library, self._library.llama_model_get_vocab(self._model))
        template = self._library.llama_model_chat_template(self._model, None)
        self.chat_template: str | None = template.decode("utf-8") if template else None
        vocabulary = self._library.llama_model_get_vocab(self._model)
        self.bos = self._text_of(self._library.llama_vocab_bos(vocabulary))
        self.eos = self._text_of(self._library.llama_vocab_eos(vocabulary))
        self._open_context()

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], wanted: Sequence[bool]
    ) -> np.ndarray:
        """Run one batch of at most `batch_tokens` tokens.

        Args:
            tokens: [N] ids; positions: [N] places in their sequence; slots: [N] sequences.
            wanted: [N] whether this position's logits are needed.

        Returns:
            [K][vocabulary] float32 logits of the K wanted positions, in order. A view, valid until the next call.
        """
        count = len(tokens)
        ids, places = np.array(tokens, np.int32), np.array(positions, np.int32)
        owners, flags = np.array(slots, np.int32), np.array(wanted, np.int8)
        one_each = np.ones(count, np.int32)
        owner_pointers = owners.ctypes.data + 4 * np.arange(count, dtype=np.uint64)
        batch = _Batch(
            count, ids.ctypes.data, None, places.ctypes.data, one_each.ctypes.data, owner_pointers.ctypes.data,
            flags.ctypes.data,
        )  # fmt: skip
        status = self._library.llama_decode(self._context, batch)
        if status != 0:
            raise ModelError(f"llama.cpp answered {status} to a batch of {count} tokens; restart the engine")
        rows = int(np.count_nonzero(flags))
        if rows == 0:
            return np.empty((0, self.vocabulary.size), np.float32)
        pointer = c.cast(self._library.llama_get_logits(self._context), c.POINTER(c.c_float))
        return np.ctypeslib.as_array(pointer, (rows, self.vocabulary.size))

    def copy_slot(self, source: int, target: int) -> None:
        """Make `target` hold what `source` holds."""
        self._library.llama_memory_seq_rm(self._memory, target, -1, -1)
        self._library.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def truncate_slot(self, slot: int, length: int) -> None:
        """Forget everything of `slot` from position `length` on."""
        self._library.llama_memory_seq_rm(self._memory, slot, length, -1)

    def replace_weights(self, gguf: Path) -> None:
        """Load another file of the same vocabulary in place; all slots become empty.

        Raises:
            ModelError: the file cannot be loaded or has another vocabulary; the old weights stay.
        """
        model = self._load(gguf)
        handle = self._library.llama_model_get_vocab(model)
        size = self._library.llama_vocab_n_tokens(handle)
        if size != self.vocabulary.size:
            self._library.llama_model_free(model)
            raise ModelError(f"{gguf} has {size} tokens in its vocabulary, the running model {self.vocabulary.size}")
        self._library.llama_free(self._context)
        old, self._model = self._model, model
        self.vocabulary.rebind(handle)
        self._library.llama_model_free(old)
        self._open_context()

    def close(self) -> None:
        """Free context and weights."""
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def _load(self, gguf: Path) -> int:
        if not gguf.is_file():
            raise ModelError(f"model file {gguf} does not exist; give a GGUF file")
        model = self._library.llama_model_load_from_file(
            os.fsencode(gguf), self._library.llama_model_default_params()
        )  # fmt: skip
        if not model:
            raise ModelError(f"llama.cpp cannot load {gguf}; it is damaged or of a kind this release does not know")
        return model

    def _open_context(self) -> None:
        params = self._library.llama_context_default_params()
        found = {name: getattr(params, name) for name in _KNOWN_DEFAULTS}
        if found != _KNOWN_DEFAULTS:
            raise ModelError(
                f"this xllamacpp orders its parameters differently (found {found}); install xllamacpp 2026.10"
            )
        params.n_ctx = self.slots * self._requested_context
        params.n_batch = params.n_ubatch = self.batch_tokens = min(MAX_BATCH_TOKENS, params.n_ctx)
        params.n_seq_max = self.slots
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._context:
            raise ModelError(
                f"llama.cpp cannot allocate {self.slots} slots of {self._requested_context} tokens; ask for less"
            )
        self.context: int = self._library.llama_n_ctx_seq(self._context)
        got = (self._library.llama_n_seq_max(self._context), self._library.llama_n_batch(self._context))
        if got != (self.slots, self.batch_tokens) or self.context < self._requested_context:
            raise ModelError(
                f"llama.cpp opened (slots, batch) {got} of {self.context} tokens; install xllamacpp 2026.10"
            )
        self._library.llama_set_n_threads(self._context, self._threads, self._threads)
        self._memory = self._library.llama_get_memory(self._context)

    def _text_of(self, token: int) -> str:
        return "" if token == _NO_TOKEN else self.vocabulary.token_bytes(token).decode("utf-8", "replace")
