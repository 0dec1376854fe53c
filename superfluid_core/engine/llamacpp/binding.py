"""The C interface of llama.cpp, as the library inside the `xllamacpp` wheel exports it.

Owns the layout of three structs, the signatures of the functions that are used, and the proof that they fit: a library whose default
parameters do not read as they should is refused by version before anything is called with them. The wheel's Python module is
not imported; it wraps llama-server, which brings a scheduler of its own.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections import deque
from pathlib import Path
from typing import Any

from superfluid_core.errors import ConfigError

PACKAGE = "xllamacpp"
INSTALL = "pip install 'superfluid-fleet[llamacpp]'"
KV_TYPES = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (30, 2)}
"""Numbers of the cache: ggml's name for them, bytes of each."""
FLASH_ATTENTION_OFF = 0
SEQUENCES_MAX = 256
"""How many sequences a context may have."""
LOG_ERROR = 4
LOG_LINES = 4

_I32, _U32, _F32 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_float
_POINTER, _BOOL = ctypes.c_void_p, ctypes.c_bool


class ModelParams(ctypes.Structure):
    """`llama_model_params`."""

    _fields_ = [
        ("devices", _POINTER),
        ("tensor_buft_overrides", _POINTER),
        *[(name, _I32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode")],
        ("main_gpu", _I32),
        ("tensor_split", _POINTER),
        ("progress_callback", _POINTER),
        ("progress_callback_user_data", _POINTER),
        ("kv_overrides", _POINTER),
        *[(name, _BOOL) for name in ("vocab_only", "check_tensors", "use_extra_bufts")],
        *[(name, _BOOL) for name in ("no_host", "no_alloc", "load_mtp")],
        ("spare", ctypes.c_uint8 * 128),
    ]


class ContextParams(ctypes.Structure):
    """`llama_context_params`."""

    _fields_ = [
        *[(name, _U32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")],
        *[(name, _U32) for name in ("n_outputs_max", "n_outputs_max_per_seq")],
        *[(name, _I32) for name in ("n_threads", "n_threads_batch", "ctx_type")],
        *[(name, _I32) for name in ("rope_scaling_type", "pooling_type", "attention_type")],
        ("flash_attn_type", _I32),
        *[(name, _F32) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")],
        *[(name, _F32) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")],
        ("yarn_orig_ctx", _U32),
        ("defrag_thold", _F32),
        ("cb_eval", _POINTER),
        ("cb_eval_user_data", _POINTER),
        ("type_k", _I32),
        ("type_v", _I32),
        ("moe_cache_size", ctypes.c_size_t),
        ("abort_callback", _POINTER),
        ("abort_callback_data", _POINTER),
        *[(name, _BOOL) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload")],
        *[(name, _BOOL) for name in ("swa_full", "kv_unified")],
        ("samplers", _POINTER),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", _POINTER),
        ("spare", ctypes.c_uint8 * 128),
    ]


class Batch(ctypes.Structure):
    """`llama_batch`: parallel columns, a row per token."""

    _fields_ = [
        ("n_tokens", _I32),
        ("token", ctypes.POINTER(_I32)),
        ("embd", _POINTER),
        ("pos", ctypes.POINTER(_I32)),
        ("n_seq_id", ctypes.POINTER(_I32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(_I32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "main_gpu": 0,
    "kv_overrides": None, "vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "no_host": False,
    "no_alloc": False, "load_mtp": False}  # fmt: skip
_CONTEXT_DEFAULTS = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1, "n_threads": 4, "n_threads_batch": 4, "ctx_type": 0, "rope_scaling_type": -1,
    "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1, "yarn_ext_factor": -1.0, "yarn_beta_slow": -1.0,
    "defrag_thold": -1.0, "cb_eval": None, "type_k": 1, "type_v": 1, "moe_cache_size": 0, "abort_callback": None,
    "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True, "swa_full": True,
    "kv_unified": False, "samplers": None, "n_samplers": 0, "ctx_other": None}  # fmt: skip

_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _POINTER)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LogCallback, _POINTER)),
    "llama_supports_gpu_offload": (_BOOL, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (_POINTER, (ctypes.c_char_p, ModelParams)),
    "llama_init_from_model": (_POINTER, (_POINTER, ContextParams)),
    "llama_model_free": (None, (_POINTER,)),
    "llama_free": (None, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_vocab_n_tokens": (_I32, (_POINTER,)),
    "llama_model_n_swa": (_I32, (_POINTER,)),
    "llama_model_is_recurrent": (_BOOL, (_POINTER,)),
    "llama_model_is_hybrid": (_BOOL, (_POINTER,)),
    "llama_model_has_encoder": (_BOOL, (_POINTER,)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_memory_seq_cp": (None, (_POINTER, _I32, _I32, _I32, _I32)),
    "llama_memory_seq_rm": (_BOOL, (_POINTER, _I32, _I32, _I32)),
    "llama_decode": (_I32, (_POINTER, Batch)),
    "llama_get_logits_ith": (ctypes.POINTER(_F32), (_POINTER, _I32)),
}


class Binding:
    """The library, loaded once a process. `errors` are the last lines that it complained with."""

    def __init__(self, path: Path, version: str) -> None:
        self.version = version
        self.errors: deque[str] = deque(maxlen=LOG_LINES)
        try:
            self._library = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise ConfigError(f"llama.cpp of {PACKAGE} {version} cannot be used: {error}") from None
        self._check(ModelParams, self.call("llama_model_default_params"), _MODEL_DEFAULTS)
        self._check(ContextParams, self.call("llama_context_default_params"), _CONTEXT_DEFAULTS)
        self._listener = _LogCallback(self._listen)  # lives as long as the library may call it
        self.call("llama_log_set", self._listener, None)
        self.call("llama_backend_init")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the table; no other thread of Python waits meanwhile."""
        return getattr(self._library, name)(*arguments)

    def complaint(self) -> str:
        """Take what the library said last about an error, in a line."""
        text = " ".join(" ".join(self.errors).split())[:200]
        self.errors.clear()
        return text or "no reason was given"

    def _check(self, kind: type[ctypes.Structure], given: Any, expected: dict[str, Any]) -> None:
        wrong = [name for name, value in expected.items() if getattr(given, name) != value]
        if wrong:
            raise ConfigError(
                f"llama.cpp of {PACKAGE} {self.version} has another layout of parameters "
                f"({kind.__name__}.{wrong[0]}); {INSTALL} installs one that fits"
            )

    def _listen(self, level: int, text: bytes | None, _data: Any) -> None:
        if level == LOG_ERROR and text:
            self.errors.append(text.decode("utf-8", "replace"))


_loaded: dict[Path, Binding] = {}


def load_binding() -> Binding:
    """Find the wheel's library and load it. Raises ConfigError when it is not there or another one than this was made for."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"--engine llamacpp needs {PACKAGE}: {INSTALL}") from None
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    found = [path for folder in folders for path in sorted(Path(folder).glob(f"{PACKAGE}.*so"))]
    if not found:
        raise ConfigError(f"{PACKAGE} {version} has no library that can be called")
    path = found[0]
    if path not in _loaded:
        _loaded[path] = Binding(path, version)
    return _loaded[path]
