"""`superfluid-noded inspect MODEL`: what is understood of a model's files, and how this machine would compute it, without loading it.

Owns the report and its two forms (lines, JSON). All judgement is elsewhere, in the code that loads: a file that this product would not
serve is said so with the words that `serve` would use, and the exit status 3. Weights are not read; their directory is, and
whatever is in it is held against the configuration.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from superfluid_core.errors import EngineError, ModelFilesError, SuperfluidError
from superfluid_core.logs import clean
from superfluid_core.modelfiles.inventory import Held, inventory
from superfluid_core.modelfiles.quantization import holds_matrix, numbers_in
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.modelfiles.shape import ModelConfig
from superfluid_noded.build import NATIVE_INSTALL
from superfluid_noded.config import settle_threads, surroundings

if TYPE_CHECKING:
    from superfluid_core.engine.torch.outline import Outline

EXIT_MODEL = 3
LINE_CHARS_MAX = 2000
NAMES_MAX = 5
KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """Say what the configuration means."""
    mixture, scaling = config.mixture, config.rope_scaling
    windowed = [n for n in range(config.layers) if config.window_of(n) is not None]
    return {
        "architecture": config.family,
        "layers": config.layers,
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocabulary,
        "context": config.window,
        "tied_embeddings": config.tied_embeddings,
        "norms": config.norms,
        "activation": config.activation,
        "rope": {
            "theta": config.rope_theta,
            "scaling": scaling.kind,
            "factor": scaling.factor,
            "original_context": scaling.original_max_position or None,
            "turned_of_head": config.turned,
            "local_theta": config.local_rope_theta or None,
            "layers_without": list(config.nope_layers),
        },
        "window": None if not windowed else {"tokens": config.sliding_window, "layers": windowed},
        "experts": None
        if mixture is None
        else {
            "count": mixture.count,
            "used": mixture.used,
            "intermediate": mixture.intermediate,
            "dense_layers": list(mixture.dense_layers),
        },
        "soft_caps": {"scores": config.attention_soft_cap, "logits": config.logit_soft_cap},
    }


def weights_of(
    config: ModelConfig, held: tuple[Held, ...], found: Outline | None
) -> dict[str, Any]:
    """Count what the files hold, by type, and what of it no layer takes."""
    stored = None if found is None else found.stored
    used = [each for each in held if stored is None or each.name in stored]
    names = {each.name for each in used}
    unused = [each for each in held if each.name not in names]
    kinds: dict[str, dict[str, Any]] = {}
    for each in used:
        kind = kinds.setdefault(
            each.type, {"type": each.type, "tensors": 0, "numbers": 0, "bytes": 0}
        )
        kind["tensors"] += 1
        kind["numbers"] += numbers_in(config.quantization, each.name, each.type, each.shape)
        kind["bytes"] += each.bytes
    total = sum(kind["numbers"] for kind in kinds.values())
    return {
        "parameters": total,
        "active_parameters": total - _idle(config),
        "bytes": sum(each.bytes for each in used),
        "types": sorted(kinds.values(), key=lambda kind: -kind["bytes"]),
        "unused": {
            "tensors": len(unused),
            "bytes": sum(each.bytes for each in unused),
            "names": [each.name for each in unused[:NAMES_MAX]],
        },
    }


def quantization_of(config: ModelConfig, held: tuple[Held, ...]) -> dict[str, Any] | None:
    """Say how a directory's matrices were quantized, and which ones were left plain."""
    kept = config.quantization
    if kept is None:
        return None
    small = {each.name for each in held if holds_matrix(kept, each.name, each.type)}
    plain = [
        each.name
        for each in held
        if len(each.shape) == 2 and each.name.endswith(".weight") and each.name not in small
    ]
    return {
        "method": kept.method,
        "bits": kept.bits,
        "group": kept.group or None,
        "block": None if kept.block is None else list(kept.block),
        "zero_points": kept.zero_points,
        "act_order": kept.by_activation,
        "mode": kept.mode or None,
        "own": len(kept.own),
        "matrices": len(small),
        "plain": {"matrices": len(plain), "names": plain[:NAMES_MAX]},
    }


def _idle(config: ModelConfig) -> int:
    """Count the numbers of experts that a token does not use."""
    mixture = config.mixture
    if mixture is None:
        return 0
    layers = sum(config.is_mixture(layer) for layer in range(config.layers))
    return layers * (mixture.count - mixture.used) * 3 * config.hidden * mixture.intermediate


def text_of(files: ModelFiles) -> dict[str, Any]:
    """Say what is known of the vocabulary, the template and the ends."""
    tokenizer, template = files.tokenizer(), files.template()
    ends = [
        {"id": token, "text": tokenizer.token_bytes(token).decode("utf-8", "replace")}
        for token in tokenizer.eos_ids
    ]
    return {
        "tokenizer": {
            "vocabulary": tokenizer.vocabulary,
            "special": len(tokenizer.special_ids),
            "bos_id": tokenizer.bos_id,
            "adds_bos": tokenizer.adds_bos,
        },
        "template": None
        if template is None
        else {
            "characters": len(template.source),
            "names_tools": "tools" in template.tools_source,
        },
        "stop_ids": ends,
        "fingerprints": {
            "text": files.text_fingerprint(),
            "weights": files.weights_fingerprint(),
        },
    }


def engine_of(
    files: ModelFiles, found: Outline, device: str, dtype: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Say which way steps would take here, and what a request may ask for. Raises EngineError for a device that cannot be used."""
    from superfluid_core.engine.torch.capabilities import invariant_gap, recorded_gap, split_gap
    from superfluid_core.engine.torch.device import Machine, choose_device, choose_dtype
    from superfluid_core.engine.torch.outline import way

    config, machine = files.config, Machine()
    place = choose_device(device, machine)
    kind = choose_dtype(dtype, config, place, machine)
    path = way(files, found, place, kind, is_exact=dtype == "float32")
    name = str(kind).removeprefix("torch.")
    engine = {
        "name": "native",
        "device": str(place),
        "dtype": name,
        "path": path.path,
        "reasons": list(path.reasons),
        "kv_bytes_per_token": 2
        * config.layers
        * config.kv_heads
        * config.head_dim
        * KV_BYTES[name],
    }
    gaps = {
        "structured_output": None,
        "embeddings": None,
        "parked_kv": None,
        "batch_invariant": invariant_gap(config),
        "recorded_decode_steps": recorded_gap(config),
        "tensor_parallel": split_gap(config),
    }
    return engine, {name: {"there": gap is None, "why_not": gap} for name, gap in gaps.items()}


def examine(
    spec: str, device: str, dtype: str, *, offline: bool
) -> tuple[dict[str, Any], str | None]:
    """Make the report, and say why the model cannot be served here, if it cannot.

    Raises ModelFilesError where not even the shape is known.
    """
    files = resolve(spec, offline=offline, token=surroundings().hub_token)
    config = files.config
    report: dict[str, Any] = {"model": files.name, "path": str(files.path), "form": files.kind}
    report |= shape_of(config) | text_of(files)
    held = inventory(files.path, files.kind)
    report["quantization"] = quantization_of(config, held)
    if importlib.util.find_spec("torch") is None:
        report["weights"] = weights_of(config, held, None)
        return report, f"the native engine needs torch: {NATIVE_INSTALL}"
    from superfluid_core.engine.torch.outline import outline

    found = outline(files)
    report["weights"] = weights_of(config, held, found if found.problem is None else None)
    problem = found.problem
    try:
        engine, capabilities = engine_of(files, found, device, dtype)
        report |= {"engine": engine, "capabilities": capabilities}
    except EngineError as error:
        problem = problem or error.message
    return report, problem


# --- as lines


def _bytes(count: int) -> str:
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def _count(number: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,}"


def _shape_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rope, window, experts = report["rope"], report["window"], report["experts"]
    yield "model", f"{report['model']} ({report['form']}, {report['path']})"
    yield (
        "architecture",
        f"{report['architecture']}, {report['layers']} layers of {report['hidden']}",
    )
    heads = f"{report['heads']} heads of {report['head_dim']}, {report['kv_heads']} of them for keys and values"
    yield "attention", heads
    unit = (
        f"{report['intermediate']} wide, {report['activation']}, norms {report['norms']} its parts"
    )
    yield "unit", unit
    if experts is not None:
        dense = f", layers {experts['dense_layers']} dense" if experts["dense_layers"] else ""
        sizes = f"{experts['used']} of {experts['count']}, {experts['intermediate']} wide{dense}"
        yield "experts", sizes
    stretched = "" if rope["scaling"] == "default" else f", {rope['scaling']} x {rope['factor']:g}"
    part = f", {rope['turned_of_head']} of {report['head_dim']} numbers"
    local = f", {rope['local_theta']:g} in layers with a window" if rope["local_theta"] else ""
    still = f", not in layers {rope['layers_without']}" if rope["layers_without"] else ""
    yield "rotation", f"theta {rope['theta']:g}{stretched}{part}{local}{still}"
    yield "context", f"{report['context']:,} tokens"
    if window is not None:
        layers = f"{len(window['layers'])} of {report['layers']} layers"
        kept = "their KV is kept whole all the same"
        yield "window", f"{window['tokens']:,} tokens in {layers}; {kept}"
    caps = [f"{name} at {cap:g}" for name, cap in report["soft_caps"].items() if cap]
    if caps:
        yield "soft caps", ", ".join(caps)


def _quantization_words(kept: Mapping[str, Any]) -> str:
    scales = "scales of rows or whole matrices"
    if kept["block"] is not None:
        scales = "blocks of {} x {}".format(*kept["block"])
    if kept["group"] is not None:
        scales = f"groups of {kept['group']}"
    zeros = ", zero points" if kept["zero_points"] else ""
    if kept["mode"] is not None:
        zeros = f", mode {kept['mode']}"
        zeros += f", {kept['own']} of a width of their own" if kept["own"] else ""
    order = ", inputs in order of activation" if kept["act_order"] else ""
    return f"{kept['method']}, {kept['bits']} bits, {scales}{zeros}{order}: {kept['matrices']} matrices"


def _weight_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kept = report["quantization"]
    if kept is not None:
        yield "quantization", _quantization_words(kept)
        plain = kept["plain"]
        more = ", ..." if plain["matrices"] > len(plain["names"]) else ""
        yield "left plain", f"{plain['matrices']} matrices: {', '.join(plain['names'])}{more}"
    weights = report["weights"]
    active = weights["active_parameters"]
    used = f", {_count(active)} a token" if active != weights["parameters"] else ""
    yield "parameters", f"{_count(weights['parameters'])}{used}, {_bytes(weights['bytes'])}"
    for kind in weights["types"]:
        tensors = f"{kind['tensors']} tensors, {_count(kind['numbers'])} numbers"
        yield f"  {kind['type']}", f"{tensors}, {_bytes(kind['bytes'])}"
    unused = weights["unused"]
    if unused["tensors"]:
        names = ", ".join(unused["names"])
        yield "not taken", f"{unused['tensors']} tensors, {_bytes(unused['bytes'])}: {names}"


def _text_lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tokenizer, template = report["tokenizer"], report["template"]
    bos = "none" if tokenizer["bos_id"] is None else str(tokenizer["bos_id"])
    added = "put before texts" if tokenizer["adds_bos"] else "not put before texts"
    known = f"{tokenizer['vocabulary']:,} ids of {report['vocabulary']:,}, {tokenizer['special']} special"
    yield "tokenizer", f"{known}, begin of text {bos}, {added}"
    tools = "" if template is None else ", names tools" if template["names_tools"] else ", no tools"
    yield (
        "template",
        "none" if template is None else f"{template['characters']:,} characters{tools}",
    )
    stops = ", ".join(f"{stop['id']} {stop['text']}" for stop in report["stop_ids"])
    yield "stop ids", stops or "none"
    prints = report["fingerprints"]
    yield "fingerprints", f"text {prints['text']}, weights {prints['weights']}"


def lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the report as labels and words."""
    yield from _shape_lines(report)
    yield from _weight_lines(report)
    yield from _text_lines(report)
    engine = report.get("engine")
    if engine is None:
        return
    yield "KV", f"{_bytes(engine['kv_bytes_per_token'])} a token in {engine['dtype']}"
    yield "engine", f"{engine['name']} on {engine['device']} in {engine['dtype']}: {engine['path']}"
    for reason in engine["reasons"]:
        yield "", reason
    there = report["capabilities"]
    can = [name.replace("_", " ") for name, each in there.items() if each["there"]]
    yield "can", ", ".join(can)
    for name, each in there.items():
        if not each["there"]:
            yield "cannot", f"{name.replace('_', ' ')}: {each['why_not']}"


@click.command("inspect")
@click.argument("model")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="Of weights and KV.")
@click.option("--offline", is_flag=True, help="Ask no hub.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object.")
def inspect(model: str, device: str, dtype: str, offline: bool, is_json: bool) -> None:  # noqa: FBT001 - click passes by name
    """Say what is understood of MODEL and how it would run here; loads nothing."""
    settle_threads()
    report: dict[str, Any] = {"model": model}
    problem: SuperfluidError | None = None
    try:
        report, words = examine(model, device, dtype, offline=offline)
        problem = None if words is None else ModelFilesError(words)
    except SuperfluidError as error:
        problem = error
    if is_json:
        told = None if problem is None else {"type": problem.code, "message": problem.message}
        click.echo(json.dumps(report | {"error": told}))
    elif "architecture" in report:
        for label, words in lines(report):
            click.echo(f"{label:<13} {clean(words, LINE_CHARS_MAX)}".rstrip())
    if problem is not None:
        raise problem
