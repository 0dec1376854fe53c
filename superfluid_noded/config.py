"""Every setting of a node: one table makes flags, environment names, TOML names and `--print-config`.

The only reader of the node's environment. Everything is parsed and judged once, into one frozen `NodeConfig`; the rest of
the program is handed the parts it needs. What contradicts itself raises ConfigError (exit 2) before anything is loaded.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from superfluid_core.config_file import read_config_file
from superfluid_core.errors import ConfigError
from superfluid_core.limits import KIB
from superfluid_core.link.addresses import format_address, is_loopback, parse_address
from superfluid_core.link.pki import pki_files
from superfluid_core.link.tls import PkiFiles
from superfluid_core.logs import FORMATS, LEVELS
from superfluid_core.options import Option, Setting, choice, integer, merge
from superfluid_core.tracing.options import TRACE_OPTIONS, TraceSettings, trace_settings
from superfluid_noded.scheduling import SCHEDULING_OPTIONS, Scheduling, parse_size, scheduling_of

DEFAULT_FILE = "/etc/superfluid/noded.toml"
LISTEN_PORT = 8454
JOIN_PORT = 8452
METRICS_PORT = 8463
INSTANCES_MAX = 64
FIM_CONTEXT_MAX = 8192

ATTENTION_BACKENDS = ("auto", "flashinfer", "varlen", "triton", "padded", "reference")
ENGINES = ("native", "mock", "llamacpp", "mlx")
_NATIVE_ONLY = (
    "gpu_memory_utilization",
    "attention_backend",
    "tensor_parallel",
    "cuda_graphs",
    "weights",
)
WEIGHTS = ("auto", "quantized", "dequantized")
_IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,256}")
_BIG = 1 << 31


class Rates(NamedTuple):
    """Speed of the simulated engine, tokens a second; 0 is infinitely fast."""

    prefill: float = 0.0
    decode: float = 0.0


def parse_rates(text: str) -> Rates:
    """Parse `prefill=4000,decode=50`; either may be left out."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, figure = part.strip().partition("=")
        if name not in Rates._fields or name in values:
            raise ValueError(f"expected prefill=N,decode=N, got {text[:40]!r}")
        try:
            values[name] = float(figure)
        except ValueError:
            raise ValueError(f"{name}: not a number: {figure[:40]!r}") from None
        if not 0 <= values[name] <= 1e12:
            raise ValueError(f"{name}: a rate is 0 (no limit) or above")
    return Rates(**values)


def parse_share(text: str) -> float:
    """Parse how much of the memory may be taken: above 0, up to 1."""
    value = _share(text)
    if value < 0.1:
        raise ValueError("a share of memory lies in 0.1..1")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"not a number: {text[:40]!r}") from None
    if not 0 <= value <= 1:
        raise ValueError("a probability lies in 0..1")
    return value


def _identity(text: str) -> str:
    if not _IDENTITY.fullmatch(text):
        raise ValueError("an identity is 1..64 of A-Z a-z 0-9 . _ -")
    return text


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("a model name is 1..256 of A-Z a-z 0-9 . _ : / -")
    return text


_MS = integer(1, 86_400_000)

OPTIONS: tuple[Option, ...] = (
    Option("listen", "Address for heads, repeatable; [v6]:PORT for IPv6; 'off' with --join.", default=("0.0.0.0:8454",),
           metavar="HOST:PORT", repeated=True),
    Option("join", f"Head to dial, repeatable: one that runs with --fleet-listen.  [default port: {JOIN_PORT}]",
           metavar="HOST:PORT", repeated=True, default=()),
    Option("engine", f"Which engine runs the model: {', '.join(ENGINES)}.", choice(*ENGINES), "native"),
    Option("model", "Model to serve: a directory, a .gguf file, a hub id, or 'demo'.", metavar="MODEL"),
    Option("model-name", "Public name of the model, repeatable.", _name, metavar="NAME", repeated=True),
    Option("offline", "Never download model files.", is_flag=True),
    Option("max-context", "Largest context in tokens.  [default: the model's]", integer(16, _BIG), metavar="N"),
    Option("max-batch", "Lanes: sessions that run at once.", integer(1, 1024), 8, metavar="N"),
    Option("device", "Where to run: auto, cpu, cuda, cuda:N.", default="auto", metavar="NAME"),
    Option("dtype", "Numbers to compute in.", choice("auto", "float32", "float16", "bfloat16"), "auto"),
    Option("weights", f"Quantized weights on a GPU, as they are or not: {', '.join(WEIGHTS)}.", choice(*WEIGHTS), "auto"),
    Option("cache-dir", "Where compiled ops and dequantized weights are kept, or 'off'.  [default: ~/.cache/superfluid]", metavar="DIR"),
    Option("threads", "CPU threads of the engine.  [default: the engine's choice]", integer(1, 4096), metavar="N"),
    Option("kv-blocks", "KV blocks in the pool.  [default: from memory]", integer(1, _BIG), metavar="N"),
    Option("kv-memory", "Memory for the KV pool, such as 8GiB.", parse_size, metavar="BYTES"),
    Option("gpu-memory-utilization", "Share for the KV pool of the GPU memory that weights and steps leave.", parse_share, 0.9, metavar="SHARE"),
    Option("block-size", "Tokens of one KV block.", choice("16", "64"), "16"),
    Option("attention-backend", f"Attention kernels: {', '.join(ATTENTION_BACKENDS)}.", choice(*ATTENTION_BACKENDS), "auto"),
    Option("tensor-parallel", "GPUs of this host that share the model.", integer(1, 16), 1, metavar="N"),
    Option("cuda-graphs", "Record decode steps on a GPU: on, off.", choice("on", "off"), "on"),
    Option("step-tokens", "Tokens in one forward pass.  [default: the engine's]", integer(1, 65_536), metavar="N"),
    *SCHEDULING_OPTIONS,
    Option("fim-model", "A second model for fill-in-the-middle, with lanes of its own.", metavar="MODEL"),
    Option("fim-model-name", "Public name of the second model, repeatable.", _name, metavar="NAME", repeated=True),
    Option("fim-max-batch", "Lanes of the second model.", integer(1, 64), 2, metavar="N"),
    Option("fim-max-context", "Largest context of the second model.  [default: its own, at most 8192]",
           integer(16, FIM_CONTEXT_MAX), metavar="N"),
    Option("record", "Write every input of the scheduler to FILE (lengths and salted hashes) for an exact replay; a --fim-model's to FILE.fim.",
           metavar="FILE"),
    Option("record-content", "Let --record keep token ids: prompts and answers can be read from the file.", is_flag=True),
    Option("identity", "Name of this node.  [default: host name and port]", _identity, metavar="NAME"),
    Option("auth-file", "Fleet key file (superfluid fleet key).", metavar="FILE"),
    Option("fleet-ca", "Certificates of an own authority, instead of a fleet key.", metavar="FILE.pem"),
    Option("fleet-cert", "This node's certificate by that authority; it gives the identity.", metavar="FILE.pem"),
    Option("fleet-cert-key", "Its private key.", metavar="FILE.pem"),
    Option("insecure-no-auth", "Serve anybody who can connect, without encryption.", is_flag=True),
    Option("handshake-timeout-ms", "From connect to WELCOME.", _MS, 10_000, metavar="N"),
    Option("idle-timeout-ms", "Close links that are silent for so long.", integer(1_000, 86_400_000), 120_000, metavar="N"),
    Option("drain-grace-ms", "How long running sessions may go on after SIGTERM.", integer(0, 86_400_000), 30_000, metavar="N"),
    Option("metrics", "Where /metrics listens, or 'off'.  [default: 127.0.0.1:8463+N for port 8454+N]", metavar="HOST:PORT"),
    Option("metrics-token-file", "Bearer token that /metrics asks for; needed off loopback.", metavar="FILE"),
    Option("ready-file", "JSON file written when the node serves.", metavar="FILE"),
    Option("exit-with-parent", "End at once when stdin closes: for nodes that a head starts.", is_flag=True),
    *TRACE_OPTIONS,
    Option("log-format", "How to log: text or json.", choice(*FORMATS), "text"),
    Option("log-level", f"Least level to log: {', '.join(LEVELS)}.", choice(*LEVELS), "info"),
    Option("mock-rates", "Speed of the mock engine; 0 is no limit.", parse_rates, Rates(), metavar="prefill=N,decode=N"),
    Option("mock-seed", "Seed of the mock engine's tokens.", integer(0, (1 << 63) - 1), 0, metavar="N"),
    Option("mock-script", "Dictated answers for the mock engine.", metavar="FILE.jsonl"),
    Option("mock-eos", "Chance of an end of text at every mock token.", _share, 0.002, metavar="P"),
    Option("mock-kv-bytes", "KV of a token that the mock engine says it moves for --park.  [default: the model's, in 16 bits]", integer(1, 1 << 30), metavar="BYTES"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MockConfig:
    """Settings of `--engine mock`."""

    rates: Rates
    seed: int
    script: Path | None
    eos: float
    kv_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FimConfig:
    """The second model: what it is, what it is called, how much room it gets."""

    model: str
    names: tuple[str, ...]
    max_batch: int
    max_context: int | None


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """What the native engine is told about its kernels and its memory."""

    memory_utilization: float = 0.9
    block_tokens: int = 16
    attention: str = "auto"
    graphs: bool = True
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the environment says beside settings: the supervisor's socket and watchdog, a download token."""

    notify_socket: str | None
    watchdog_usec: str | None
    watchdog_pid: str | None
    hub_token: str | None

    def __repr__(self) -> str:
        return "Surroundings(...)"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Everything a node was told, parsed and judged."""

    listen: tuple[tuple[str, int], ...]
    join: tuple[tuple[str, int], ...]
    engine: str
    model: str
    names: tuple[str, ...]
    offline: bool
    max_context: int | None
    max_batch: int
    device: str
    dtype: str
    weights: str
    cache_dir: Path | None
    threads: int | None
    kv_blocks: int | None
    kv_memory_bytes: int | None
    step_tokens: int | None
    gpu: GpuConfig
    scheduling: Scheduling
    fim: FimConfig | None
    record: Path | None
    record_content: bool
    identity: str
    auth_file: Path | None
    pki: PkiFiles | None
    insecure_no_auth: bool
    handshake_ms: int
    idle_timeout_ms: int
    drain_grace_ms: int
    metrics: tuple[str, int] | None
    metrics_token: bytes | None
    ready_file: Path | None
    exit_with_parent: bool
    log_format: str
    log_level: str
    mock: MockConfig
    around: Surroundings
    traces: TraceSettings | None = None


def read_settings(flags: Mapping[str, Any], file: str | None) -> dict[str, Setting]:
    """Merge flags, environment and the configuration file (`file`, or the default one if it exists)."""
    return merge(
        OPTIONS,
        flags,
        os.environ,
        read_config_file(file or os.environ.get("SUPERFLUID_CONFIG"), DEFAULT_FILE),
    )


def surroundings() -> Surroundings:
    """Read what the supervisor and the hub left in the environment."""
    get = os.environ.get
    return Surroundings(
        get("NOTIFY_SOCKET"), get("WATCHDOG_USEC"), get("WATCHDOG_PID"), get("HF_TOKEN")
    )


def settle_threads() -> None:
    """Let torch's idle threads sleep instead of spin, unless the operator says otherwise; call it before torch is loaded.

    Two nodes that spin on the same two cores decode 3 to 4 times slower than two that sleep; alone, sleeping costs nothing
    that could be measured.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def settle_triton(*, interpret: bool) -> None:
    """Say whether Triton runs kernels as Python, unless the environment does; call it before triton is loaded."""
    os.environ.setdefault("TRITON_INTERPRET", "1" if interpret else "0")


def build_config(settings: Mapping[str, Setting], around: Surroundings) -> NodeConfig:
    """Judge the settings together. Raises ConfigError."""
    value = {name: setting.value for name, setting in settings.items()}
    if not value["model"]:
        raise ConfigError("--model is needed: a directory, a .gguf file, a hub id, or 'demo'")
    if value["record_content"] and not value["record"]:
        raise ConfigError("--record-content belongs to --record FILE")
    if value["kv_blocks"] is not None and value["kv_memory"] is not None:
        raise ConfigError("--kv-blocks and --kv-memory: give one of them")
    _judge_engine(settings)
    listen, join = _addresses(value)
    port = listen[0][1] if listen else LISTEN_PORT
    token = _read_token(value["metrics_token_file"])
    mock = MockConfig(
        value["mock_rates"],
        value["mock_seed"],
        _path(value["mock_script"]),
        value["mock_eos"],
        value["mock_kv_bytes"],
    )
    return NodeConfig(
        listen=listen,
        join=join,
        engine=value["engine"],
        model=value["model"],
        names=tuple(dict.fromkeys(value["model_name"])),
        offline=value["offline"],
        max_context=value["max_context"],
        max_batch=value["max_batch"],
        device=value["device"],
        dtype=value["dtype"],
        weights=value["weights"],
        cache_dir=cache_dir(value["cache_dir"]),
        threads=value["threads"],
        kv_blocks=value["kv_blocks"],
        kv_memory_bytes=value["kv_memory"],
        step_tokens=value["step_tokens"],
        gpu=GpuConfig(
            value["gpu_memory_utilization"],
            int(value["block_size"]),
            value["attention_backend"],
            value["cuda_graphs"] == "on",
            value["tensor_parallel"],
        ),
        scheduling=scheduling_of(value),
        fim=_fim(value),
        record=_path(value["record"]),
        record_content=value["record_content"],
        identity=value["identity"] or default_identity(socket.gethostname(), port),
        auth_file=_path(value["auth_file"]),
        pki=_pki(value),
        insecure_no_auth=value["insecure_no_auth"],
        handshake_ms=value["handshake_timeout_ms"],
        idle_timeout_ms=value["idle_timeout_ms"],
        drain_grace_ms=value["drain_grace_ms"],
        metrics=_metrics_address(value["metrics"], port, has_token=token is not None),
        metrics_token=token,
        ready_file=_path(value["ready_file"]),
        exit_with_parent=value["exit_with_parent"],
        log_format=value["log_format"],
        log_level=value["log_level"],
        mock=mock,
        around=around,
        traces=trace_settings(value),
    )


def _addresses(
    value: Mapping[str, Any],
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """Read where to listen and whom to join. Raises ConfigError, also for heads that nobody answers for."""
    join = tuple(dict.fromkeys(parse_address(text, JOIN_PORT) for text in value["join"] or ()))
    for host, port in join:
        is_judged = value["auth_file"] or value["fleet_ca"] or value["insecure_no_auth"]
        if not (is_loopback(host) or host == "localhost" or is_judged):
            raise ConfigError(
                f"--join {format_address(host, port)}: a head off this machine needs --auth-file FILE, "
                "or --insecure-no-auth"
            )
    if "off" in value["listen"]:
        if not join or len(value["listen"]) > 1:
            raise ConfigError("--listen off stands alone, and needs --join HOST:PORT")
        return (), join
    return tuple(parse_address(text, LISTEN_PORT) for text in value["listen"]), join


def _pki(value: Mapping[str, Any]) -> PkiFiles | None:
    """Read the files of an own authority; they stand instead of a key. Raises ConfigError."""
    files = pki_files(value["fleet_ca"], value["fleet_cert"], value["fleet_cert_key"])
    if files is not None and (value["auth_file"] or value["insecure_no_auth"]):
        raise ConfigError("--fleet-ca excludes --auth-file and --insecure-no-auth")
    return files


def default_identity(host: str, port: int) -> str:
    """Make `<host>-<port>` of characters that an identity may have; the process's id stands for a port yet unknown."""
    short = re.sub(r"[^A-Za-z0-9._-]", "-", host.split(".")[0])[:40] or "node"
    return f"{short}-{port or f'p{os.getpid()}'}"


def _fim(value: Mapping[str, Any]) -> FimConfig | None:
    if not value["fim_model"]:
        return None
    names = tuple(dict.fromkeys(value["fim_model_name"]))
    return FimConfig(value["fim_model"], names, value["fim_max_batch"], value["fim_max_context"])


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def cache_dir(text: str | None) -> Path | None:
    """Where things that can be made again are kept: as told, else the user's cache; None when it is off or there is none."""
    if text == "off":
        return None
    if text:
        return Path(text).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "superfluid"
    except RuntimeError:  # no home directory
        return None


def _judge_engine(settings: Mapping[str, Setting]) -> None:
    """Refuse flags that the chosen engine would not heed."""
    engine = settings["engine"].value
    for name, it in settings.items():
        if it.source != "flag":
            continue
        flag = name.replace("_", "-")
        if name.startswith("mock_") and engine != "mock":
            raise ConfigError(f"--{flag} belongs to --engine mock")
        if name in _NATIVE_ONLY and engine in ("llamacpp", "mlx"):
            raise ConfigError(f"--{flag} belongs to --engine native")
        if name == "threads" and engine == "mlx":
            raise ConfigError("--threads: MLX chooses its threads itself")


def _metrics_address(text: str | None, port: int, *, has_token: bool) -> tuple[str, int] | None:
    if text == "off":
        return None
    if text is None:
        instance = port - LISTEN_PORT
        is_usual = 0 <= instance < INSTANCES_MAX
        return "127.0.0.1", METRICS_PORT + instance if is_usual else 0
    host, at = parse_address(text, METRICS_PORT)
    if not (is_loopback(host) or host == "localhost" or has_token):
        raise ConfigError(f"--metrics {text}: off loopback a --metrics-token-file is needed")
    return host, at


def _read_token(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        data = Path(path).read_bytes()[: 4 * KIB].strip()
    except OSError as error:
        raise ConfigError(f"--metrics-token-file: {error.strerror or 'cannot be read'}") from None
    if len(data) < 16:
        raise ConfigError("--metrics-token-file: a token has at least 16 characters")
    return data
