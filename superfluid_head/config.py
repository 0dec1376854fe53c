"""Every setting of a head: one table makes flags, environment names, TOML names and `superfluid config check`.

The only reader of the head's environment. Everything is parsed and judged once, into one frozen `HeadConfig`; the rest
of the program is handed the parts it needs. What contradicts itself raises ConfigError (exit 2) before anything starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from superfluid_core.config_file import read_config_file
from superfluid_core.engine.embedding import POOLINGS
from superfluid_core.errors import ConfigError
from superfluid_core.limits import MIB, FleetLimits, HttpLimits, LinkLimits
from superfluid_core.link.addresses import is_loopback, parse_address
from superfluid_core.link.pki import pki_files
from superfluid_core.link.tls import PkiFiles
from superfluid_core.logs import FORMATS, LEVELS
from superfluid_core.options import Option, Setting, choice, integer, merge
from superfluid_core.session import QosClass
from superfluid_core.tracing.options import TRACE_OPTIONS, TraceSettings, trace_settings
from superfluid_head.access.keys import KeyRing, read_key_file, share_of
from superfluid_head.access.ratelimit import RateLimit
from superfluid_head.access.rules import ACCESS_OPTIONS, AccessRules, KeySources, build_access
from superfluid_head.api.message import REASONING_FIELDS
from superfluid_head.api.qos import QosRules
from superfluid_head.fleet.directory import NodeAddress, parse_fleet
from superfluid_head.text.dialects.detect import AUTO, DIALECTS, NONE, DialectChoice
from superfluid_head.text.dialects.dialect import CALL_PARSERS, REASONING_PARSERS

DEFAULT_FILE = "/etc/superfluid/head.toml"
HTTP_PORT = 8453
FLEET_PORT = 8452
WORKERS_MAX = 64
PLACEMENTS = ("load-aware", "least-loaded", "round-robin")

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,256}")
_LIMITS = HttpLimits()
_LINK = LinkLimits()
_FLEET = FleetLimits()


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("a model name is 1..256 of A-Z a-z 0-9 . _ : / -")
    return text


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"not a number: {text[:40]!r}") from None
    if not 0 <= value <= 1e6:
        raise ValueError("a rate is 0 (no limit) to 1000000 a second")
    return value


# Settings of the local node that `serve MODEL` starts; it parses and judges them itself.
LOCAL_NAMES = (
    *("engine", "device", "dtype", "threads", "max-batch", "max-context", "kv-blocks", "kv-memory"),
    *(
        "class-lanes",
        "queue-policy",
        "fair-weights",
        "tenant-lanes",
        "tenant-weights",
        "kv-reserve",
        "watermark",
        "victim",
    ),
    *("batching", "prefill-mode", "preempt-mode", "park-bytes", "pressure-high", "pressure-low"),
    *("os-pressure", "pin-budget-pct", "prefill-budget", "tick-target-ms", "starvation-ticks"),
    *("fim-model", "fim-model-name", "fim-max-batch", "fim-max-context"),
)
LOCAL_OPTIONS = (
    *(Option(name, f"--{name} of the local node.", metavar="VALUE") for name in LOCAL_NAMES),
    Option("park", "--park of the local node.", is_flag=True),
)

OPTIONS: tuple[Option, ...] = (
    Option("model", "Model to serve, repeatable: a directory, a .gguf file, a hub id, or 'demo'.",
           metavar="MODEL", repeated=True),
    Option("model-name", "Public name of the model of a local node.", _name, metavar="NAME"),
    Option("node-arg", "Argument for the local node, repeatable: --node-arg=--max-batch=4.", metavar="ARG", repeated=True),
    Option("fleet", "Nodes, separated by commas or repeated, or @FILE, read again on SIGHUP.  "
           "[default: one local node for MODEL]", metavar="[NAME=]HOST[:PORT]", repeated=True),
    Option("fleet-listen", "Where nodes may dial in (superfluid-noded --join), repeatable; beside --fleet or instead of it.  "
           f"[default port: {FLEET_PORT}]", metavar="HOST:PORT", repeated=True, default=()),
    Option("fleet-conns-per-node", "Links to each node, for bandwidth; sessions spread over them.",
           integer(1, _LINK.conns_per_node_max), 1, metavar="N"),
    Option("fleet-auth", "Fleet key file (superfluid fleet key).", metavar="FILE"),
    Option("fleet-ca", "Certificates of an own authority, instead of a fleet key.", metavar="FILE.pem"),
    Option("fleet-cert", "This head's certificate by that authority; it gives the head's name.", metavar="FILE.pem"),
    Option("fleet-cert-key", "Its private key.", metavar="FILE.pem"),
    Option("insecure-no-auth", "Nodes without a key, and listeners off loopback without API keys.", is_flag=True),
    Option("http", "Address for clients, repeatable; [v6]:PORT for IPv6.", default=(f"127.0.0.1:{HTTP_PORT}",),
           metavar="HOST:PORT", repeated=True),
    *ACCESS_OPTIONS,
    Option("placement", f"How nodes are chosen: {', '.join(PLACEMENTS)}.", choice(*PLACEMENTS), "load-aware"),
    Option("fleet-dead-ms", "Silence after which a node is dead.", integer(100, 600_000), _LINK.dead_ms, metavar="N"),
    Option("allow-mixed", "Accept nodes that serve different weights under one name.", is_flag=True),
    Option("offline", "Never download model files.", is_flag=True),
    Option("max-body-mib", "Largest request body, MiB.", integer(1, 1_024), _LIMITS.body_bytes_max // MIB, metavar="N"),
    Option("drain-ms", "How long streams may go on after SIGTERM.", integer(0, 86_400_000), _LIMITS.drain_ms, metavar="N"),
    Option("prefix-scope", "Who may share cached prefixes: tenant, shared (nodes must agree).",
           choice("tenant", "shared"), "tenant"),
    Option("max-queue", "Requests that may wait in this head.", integer(0, 1_000_000), _FLEET.queue_max, metavar="N"),
    Option("max-queued-tokens", "Prompt tokens that may wait in this head; 0 is off.", integer(0, 1 << 40),
           _FLEET.queued_tokens_max, metavar="N"),
    Option("no-node-wait-ms", "How long a request waits for a node while none serves its model; 0 refuses at once.",
           integer(0, _FLEET.queue_wait_ms_max), _FLEET.no_node_wait_ms, metavar="N"),
    Option("ttft-slo-ms", "Refuse what is predicted to wait longer for a lane; 0 is off.", integer(0, 86_400_000),
           _FLEET.ttft_slo_ms, metavar="N"),
    Option("fleet-pool-high", "Occupancy from which load-aware placement avoids a node while another is below, percent.",
           integer(1, 100), _FLEET.pool_high_pct, metavar="PCT"),
    Option("http-default-qos", "Class of requests that name none.  [default: agent]", QosClass.parse, metavar="CLASS"),
    Option("no-http-qos-header", "Ignore x-superfluid-qos, but for keys with a ceiling of their own.", is_flag=True),
    Option("http-allow-batch-invariant", "Let anybody ask for a lane that ticks alone.", is_flag=True),
    Option("completion-rate", "Completions a second of one client; 0 is no limit.", _rate, 10.0, metavar="N"),
    Option("completion-burst", "Completions of one client at once.", integer(1, 100_000), 20, metavar="N"),
    Option("completion-deadline-ms", "Drop completions that have not started by then; 0 is off.",
           integer(0, 86_400_000), 0, metavar="N"),
    *LOCAL_OPTIONS,
    Option("dialect", f"How models write tool calls and reasoning: {AUTO} (from the template), {NONE}, {', '.join(DIALECTS)}.",
           choice(AUTO, NONE, *DIALECTS), AUTO, metavar="NAME"),
    Option("tool-call-parser", f"How they write tool calls: {AUTO}, {NONE}, {', '.join(CALL_PARSERS)}.",
           choice(AUTO, NONE, *CALL_PARSERS), AUTO, metavar="NAME"),
    Option("reasoning-parser", f"How they mark reasoning: {AUTO}, {NONE}, {', '.join(REASONING_PARSERS)}.",
           choice(AUTO, NONE, *REASONING_PARSERS), AUTO, metavar="NAME"),
    Option("reasoning-field", "Name of the reasoning in replies: reasoning_content, or both (reasoning as well).",
           choice(*REASONING_FIELDS), "reasoning_content", metavar="NAME"),
    Option("embedding-pooling", f"How models embed whose request does not say: none (refused), {', '.join(POOLINGS)}.",
           choice(NONE, *POOLINGS), NONE, metavar="NAME"),
    Option("workers", f"Heads that share the port, a process each, 1 to {WORKERS_MAX}; several need --fleet.",
           integer(1, WORKERS_MAX), 1, metavar="N"),
    Option("debug-headers", "Say in replies how often a request moved.", is_flag=True),
    Option("ready-file", "JSON file written when the head listens and a node of its own is up.", metavar="FILE"),
    *TRACE_OPTIONS,
    Option("log-format", "How to log: text or json.", choice(*FORMATS), "text"),
    Option("log-level", f"Least level to log: {', '.join(LEVELS)}.", choice(*LEVELS), "info"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the environment says beside settings."""

    notify_socket: str | None
    hub_token: str | None
    watchdog_usec: str | None = None
    watchdog_pid: str | None = None

    def __repr__(self) -> str:
        return "Surroundings(...)"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Everything a head was told, parsed and judged."""

    models: tuple[str, ...]
    model_name: str | None
    node_arguments: tuple[str, ...]
    fleet: tuple[NodeAddress, ...]
    fleet_texts: tuple[str, ...]
    fleet_listen: tuple[tuple[str, int], ...]
    fleet_conns: int
    fleet_auth: Path | None
    pki: PkiFiles | None
    insecure_no_auth: bool
    http: tuple[tuple[str, int], ...]
    keys: KeyRing
    access: AccessRules
    placement: str
    fleet_dead_ms: int
    allow_mixed: bool
    offline: bool
    limits: HttpLimits
    fleet_limits: FleetLimits
    qos: QosRules
    prefix_shared: bool
    debug_headers: bool
    dialects: DialectChoice
    reasoning_field: str
    embedding_pooling: str
    ready_file: Path | None
    log_format: str
    log_level: str
    around: Surroundings
    traces: TraceSettings | None = None
    workers: int = 1

    @property
    def is_fleet_judged(self) -> bool:
        """Whether somebody answered for nodes off this machine: a key, or the word that none is wanted."""
        return self.has_fleet_keys or self.insecure_no_auth

    @property
    def has_fleet_keys(self) -> bool:
        return self.fleet_auth is not None or self.pki is not None

    @property
    def has_fleet(self) -> bool:
        """Whether there are nodes of somebody else's: then no local one is started."""
        return bool(self.fleet or self.fleet_listen)


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
        get("NOTIFY_SOCKET"), get("HF_TOKEN"), get("WATCHDOG_USEC"), get("WATCHDOG_PID")
    )


def client_key(file: str | None) -> str | None:
    """Find the API key that our own client sends: a file, or the environment."""
    if file is not None:
        return read_key_file(Path(file))
    return os.environ.get("SUPERFLUID_API_KEY") or None


def read_keys(sources: KeySources) -> KeyRing:
    """Read the keys of clients, or read them again. Raises ConfigError."""
    return sources.read(os.environ)


def build_config(settings: Mapping[str, Setting], around: Surroundings) -> HeadConfig:
    """Judge the settings together. Raises ConfigError."""
    value = {name: setting.value for name, setting in settings.items()}
    models, fleet = value["model"], value["fleet"]
    has_fleet = bool(fleet or value["fleet_listen"])
    if not models and not has_fleet:
        raise ConfigError("nothing to serve: give a MODEL, or --fleet HOST:PORT, or --fleet-listen")
    pki = _pki(value)
    is_judged = bool(value["fleet_auth"] or pki or value["insecure_no_auth"])
    nodes = read_fleet(fleet, is_judged=is_judged)
    if len(models) > 1 and not has_fleet:
        raise ConfigError("several models need --fleet: a local node serves one")
    if value["model_name"] and has_fleet:
        raise ConfigError("--model-name belongs to a local node; remote nodes name their models")
    local = _local_arguments(settings)
    if (value["node_arg"] or local.flags) and has_fleet:
        name = "node-arg" if value["node_arg"] else local.flags[0]
        raise ConfigError(f"--{name} belongs to a local node; there is none with --fleet")
    _judge_workers(value, has_pki=pki is not None)
    limits = replace(
        _LIMITS, body_bytes_max=value["max_body_mib"] * MIB, drain_ms=value["drain_ms"]
    )
    access = build_access(value)
    return HeadConfig(
        models=tuple(dict.fromkeys(models)),
        model_name=value["model_name"],
        node_arguments=() if has_fleet else (*local.arguments, *value["node_arg"]),
        fleet=nodes,
        fleet_texts=tuple(fleet),
        fleet_listen=tuple(parse_address(text, FLEET_PORT) for text in value["fleet_listen"] or ()),
        fleet_conns=value["fleet_conns_per_node"],
        fleet_auth=_path(value["fleet_auth"]),
        pki=pki,
        insecure_no_auth=value["insecure_no_auth"],
        http=tuple(parse_address(text, HTTP_PORT) for text in value["http"]),
        keys=read_keys(access.sources),
        access=access,
        placement=value["placement"],
        fleet_dead_ms=value["fleet_dead_ms"],
        allow_mixed=value["allow_mixed"],
        offline=value["offline"],
        limits=limits,
        fleet_limits=replace(
            _FLEET,
            queue_max=value["max_queue"],
            queued_tokens_max=value["max_queued_tokens"],
            no_node_wait_ms=value["no_node_wait_ms"],
            ttft_slo_ms=value["ttft_slo_ms"],
            pool_high_pct=value["fleet_pool_high"],
        ),
        qos=_qos(value),
        prefix_shared=value["prefix_scope"] == "shared",
        debug_headers=value["debug_headers"],
        dialects=DialectChoice(
            value["dialect"], value["tool_call_parser"], value["reasoning_parser"]
        ),
        reasoning_field=value["reasoning_field"],
        embedding_pooling=value["embedding_pooling"],
        ready_file=_path(value["ready_file"]),
        log_format=value["log_format"],
        log_level=value["log_level"],
        around=around,
        traces=trace_settings(value),
        workers=value["workers"],
    )


def _judge_workers(value: Mapping[str, Any], *, has_pki: bool) -> None:
    """Refuse what several heads in one place cannot share. Raises ConfigError."""
    if value["workers"] == 1:
        return
    if not value["fleet"]:
        raise ConfigError("--workers needs --fleet: a node of one's own has one head")
    if value["fleet_listen"]:
        raise ConfigError("--workers excludes --fleet-listen: a node that joins finds one head")
    if has_pki:
        raise ConfigError("--workers excludes --fleet-cert: a certificate names one head")


def read_fleet(texts: tuple[str, ...], *, is_judged: bool) -> tuple[NodeAddress, ...]:
    """Read `--fleet`, and the files that it names. Raises ConfigError, also for strangers that nobody answers for."""
    nodes = parse_fleet(texts)
    strangers = [node for node in nodes if not _is_here(node.host)]
    if strangers and not is_judged:
        raise ConfigError(
            f"--fleet {strangers[0]}: a node off this machine needs --fleet-auth FILE (make one with: "
            "superfluid fleet key), or --insecure-no-auth"
        )
    return nodes


def _pki(value: Mapping[str, Any]) -> PkiFiles | None:
    """Read what the fleet trusts, of which there is one thing at most. Raises ConfigError."""
    if value["fleet_auth"] and value["insecure_no_auth"]:
        raise ConfigError("--fleet-auth and --insecure-no-auth exclude each other")
    files = pki_files(value["fleet_ca"], value["fleet_cert"], value["fleet_cert_key"])
    if files is not None and (value["fleet_auth"] or value["insecure_no_auth"]):
        raise ConfigError("--fleet-ca excludes --fleet-auth and --insecure-no-auth")
    return files


class _Local(NamedTuple):
    """What a local node is told beside its model, and which of it came as flags."""

    arguments: tuple[str, ...]
    flags: tuple[str, ...]


def _local_arguments(settings: Mapping[str, Setting]) -> _Local:
    arguments: list[str] = []
    flags: list[str] = []
    for option in LOCAL_OPTIONS:
        value, source = settings[option.attribute]
        if value in (None, False):
            continue
        arguments += [f"--{option.name}"] if option.is_flag else [f"--{option.name}", str(value)]
        flags += [option.name] if source == "flag" else []
    if settings["prefix_scope"].value != "tenant":
        arguments += ["--prefix-scope", settings["prefix_scope"].value]
    return _Local(tuple(arguments), tuple(flags))


def _qos(value: Mapping[str, Any]) -> QosRules:
    default = value["http_default_qos"]
    return QosRules(
        default=QosClass.AGENT if default is None else default,
        has_header=not value["no_http_qos_header"],
        may_be_alone=value["http_allow_batch_invariant"],
        completions=RateLimit(
            value["completion_rate"] / value["workers"],
            share_of(value["completion_burst"], value["workers"]),
        ),
        completion_deadline_ms=value["completion_deadline_ms"],
    )


def _is_here(host: str) -> bool:
    return host == "localhost" or is_loopback(host)


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def version() -> str:
    """Return the version of the installed distribution."""
    try:
        return metadata.version("superfluid-fleet")
    except metadata.PackageNotFoundError:
        return "unknown"
