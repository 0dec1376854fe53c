"""Every bound of the product, named. Full means a typed refusal, never a silent drop.

Grouped in frozen dataclasses with defaults; what an operator may change is overridden by `config.py` of each program.
Sources: fleet.md 2-5, reliability.md 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds of frames, judged before anything is allocated."""

    head_bytes_max: int = 60 * KIB
    hello_bytes_max: int = 4 * KIB
    open_bytes_max: int = 8 * MIB
    tokens_bytes_max: int = 256 * KIB
    prefix_bytes_max: int = 1 * MIB
    frame_bytes_max: int = 64 * KIB
    file_piece_bytes: int = 48 * KIB
    file_bytes_max: int = 64 * MIB
    token_rows_max: int = 256
    text_chars_max: int = 200
    features_max: int = 64
    models_max: int = 64
    stop_ids_max: int = 1024
    logit_bias_max: int = 1024
    allowed_ids_max: int = 1024
    bad_words_max: int = 1024
    logprobs_max: int = 20
    grammar_bytes_max: int = 64 * KIB
    frame_seconds: int = 20
    open_seconds: int = 60


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of connections (fleet.md 2 and 5)."""

    handshake_ms: int = 10_000
    pending_handshakes_max: int = 64
    pending_per_address_max: int = 8
    new_per_second_per_address: int = 20
    new_burst_per_address: int = 40
    heads_max: int = 16
    links_per_head_max: int = 18
    idle_timeout_ms: int = 120_000
    ping_ms: int = 15_000
    suspect_ms: int = 1_000
    dead_ms: int = 3_000
    engine_hung_ms: int = 5_000
    session_stalled_ms: int = 10_000
    lease_ttl_ms: int = 10_000
    lease_ttl_max_ms: int = 30_000
    lease_renew_ms: int = 2_000
    status_ms: int = 250
    status_ms_min: int = 50
    progress_ms: int = 250
    dial_backoff_ms_min: int = 200
    dial_backoff_ms_max: int = 10_000
    own_pause_ms: int = 1_000
    outgoing_bytes_max: int = 32 * MIB
    insecure_warning_s: int = 60
    rekey_bytes: int = 32 * 1024 * MIB
    rekey_s: int = 12 * 3_600
    rekey_grace_ms: int = 30_000
    conns_per_node_max: int = 8
    joined_nodes_max: int = 1_024
    joined_forget_ms: int = 300_000
    key_file_bytes_max: int = 64 * KIB
    pki_file_bytes_max: int = 1 * MIB


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """Bounds of placement, moves and the head's queue (fleet.md 6 and 7)."""

    moves_max: int = 3
    processes_lost_max: int = 2
    reprefills_per_node: int = 4
    quarantine_s: int = 600
    quarantine_entries_max: int = 4_096
    sessions_over_lanes: int = 2
    queue_max: int = 256
    queue_wait_ms_max: int = 600_000
    no_node_wait_ms: int = 30_000
    queued_tokens_max: int = 0
    ttft_slo_ms: int = 0
    moves_per_s: int = 64
    moves_burst: int = 256
    warm_up_ms: int = 10_000
    warming_max: int = 16
    drain_grace_ms: int = 30_000
    pool_high_pct: int = 90
    faults_to_open: int = 3
    fault_window_ms: int = 60_000
    circuit_open_ms: int = 10_000
    circuit_open_ms_max: int = 120_000
    journal_tokens_max: int = 1 << 20


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Knobs and bounds of the tick scheduler; flags of the same names (scheduler.md)."""

    lanes: int = 8
    queue_max: int = 256
    queued_tokens_max: int = 0
    prefill_budget: int = 4096
    decode_budget: int = 0
    tick_target_ms: int = 2000
    starvation_ticks: int = 8
    step_tokens: int = 512
    watermark_pct: int = 1


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of the HTTP side (reliability.md 2.2, http_api.md 0)."""

    connections_max: int = 4_096
    header_bytes_max: int = 32 * KIB
    header_count_max: int = 100
    header_ms: int = 10_000
    body_ms: int = 30_000
    body_bytes_max: int = 16 * MIB
    json_depth_max: int = 64
    messages_max: int = 2_048
    stops_max: int = 16
    stop_chars_max: int = 256
    choices_max: int = 128
    silence_ms: int = 5_000
    keep_alive_s: int = 75
    slow_client_bytes_max: int = 16 * KIB
    slow_client_ms: int = 60_000
    template_ms: int = 1_000
    template_chars_per_token: int = 4
    tokenize_inline_bytes_max: int = 256 * KIB
    bytes_per_token_max: int = 128
    request_id_chars_max: int = 128
    drain_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds of several heads on one port: when one counts as hung, and when one that ended is started again."""

    hang_ms: int = 15_000
    start_silent_ms: int = 60_000
    abort_ms: int = 2_000
    own_pause_ms: int = 1_000
    pause_ms_min: int = 200
    pause_ms_max: int = 10_000
    settled_ms: int = 60_000
    stop_margin_ms: int = 20_000
    ask_ms: int = 5_000
    watch_ask_ms: int = 1_000
    follow_pause_ms: int = 500
