"""Model shapes from Hugging Face's ``config.json`` and back, as transformers 4 and 5 spell it.

Keys that transformers' class of the family ignores are ignored. Of a multimodal model only the text part is read.
Attention dropout is ignored, as no decoder here has it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from hybridtrain.config.decode import missing_path
from hybridtrain.config.encode import JsonMapping, JsonValue
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.models.families import FAMILIES, Family, HfFamily, HfMultimodal
from hybridtrain.models.model_config import Experts, ModelConfig, RopeScaling
from hybridtrain.plain_file import read_plain

_SIZES: Final = {
    "vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings", "num_blocks": "num_hidden_layers",
    "width": "hidden_size", "num_heads": "num_attention_heads", "ffn_width": "intermediate_size",
}  # fmt: skip
"""Our field names -> transformers' keys."""
_ACTIVATIONS: Final = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new")}
"""transformers' spellings of our values; the first is written."""
_SCALING_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": (), "llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")
}  # fmt: skip


def model_config_from_hf(source: Mapping[str, JsonValue] | Path) -> ModelConfig:
    """Return the shape of a transformers model from its ``config.json``: the content, the file or its folder.

    Raises:
        ConfigError: the file cannot be read or is not supported; each fault states its key.
    """
    if not isinstance(source, Path):
        return _read(source, "config.json")
    return _read(read_hf_config(source), str(source / "config.json" if source.is_dir() else source))


def read_hf_config(source: Path) -> dict[str, JsonValue]:
    """Return the content of a ``config.json`` file or of the one in a folder; raises ``ConfigError`` if unreadable."""
    return read_json(source / "config.json" if source.is_dir() else source, "give the file that transformers wrote")


def read_json(path: Path, remedy: str) -> dict[str, JsonValue]:
    """Return the JSON object in a file; raises ``ConfigError`` with ``remedy`` if it is unreadable or not an object."""
    try:
        mapping = json.loads(read_plain(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(str(path), [missing_path(path)]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read ({error.strerror}); check its permissions"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), [f"is not JSON ({error}); {remedy}"]) from error
    if not isinstance(mapping, dict):
        raise ConfigError(str(path), [f"is not a JSON object; {remedy}"])
    return mapping


def hf_text_config(mapping: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Return the text part of a multimodal model's ``config.json``, and any other unchanged."""
    hf, text = _multimodal(mapping), mapping.get("text_config")
    if hf is None or hf.multimodal is None or not isinstance(text, dict):
        return mapping
    tokens = {key: mapping[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in mapping}
    return {
        **hf.multimodal.text, **text, **tokens, "architectures": [hf.architecture], "model_type": hf.model_type,
        "tie_word_embeddings": mapping.get("tie_word_embeddings", hf.multimodal.is_tied),
    }  # fmt: skip


def is_multimodal(mapping: Mapping[str, JsonValue]) -> bool:
    """Return whether ``config.json`` is of a multimodal model, of which only the text model is read."""
    return _multimodal(mapping) is not None


def _multimodal(mapping: Mapping[str, JsonValue]) -> HfFamily | None:
    named = mapping.get("architectures") or mapping.get("model_type")
    named = named[0] if isinstance(named, list) else named
    families = (parts.hf for parts in FAMILIES.values())
    return next(
        (hf for hf in families if (whole := hf.multimodal) and named in (whole.architecture, whole.model_type)), None
    )


def hf_architectures() -> dict[str, Family]:
    """Return the supported architectures: transformers' names -> our families."""
    return {spelling.architecture: name for spelling, name in _spellings()}


def _spellings() -> list[tuple[HfFamily | HfMultimodal, Family]]:
    """Return transformers' classes, those of multimodal models last."""
    wholes = [(parts.hf.multimodal, name) for name, parts in FAMILIES.items() if parts.hf.multimodal]
    return [*((parts.hf, name) for name, parts in FAMILIES.items()), *wholes]


def hf_config_of(model: ModelConfig) -> JsonMapping:
    """Return the ``config.json`` of a shape, without dtype and special tokens.

    Raises ``ConfigError`` if transformers' class of the family cannot express it.
    """
    hf = model.architecture.hf
    values: JsonMapping = {theirs: getattr(model, ours) for ours, theirs in _SIZES.items()}
    values |= {"rms_norm_eps": model.norm_eps, "hidden_act": _ACTIVATIONS[model.architecture.activation][0]}
    values = {hf.renamed.get(key, key): value for key, value in values.items()}
    values |= {
        "architectures": [hf.architecture], "model_type": hf.model_type, "tie_word_embeddings": model.tied,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if model.family == "gpt2":
        values |= {"activation_function": "gelu_new", "attn_pdrop": 0.0}
        values |= {"resid_pdrop": model.dropout, "embd_pdrop": model.dropout}
    else:
        values |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim, "attention_dropout": 0.0}
        values |= _rope_keys(model) | _window_keys(model, hf)
    if model.family.startswith("gemma"):
        values |= {
            "query_pre_attn_scalar": round(model.query_scale**-2) if model.query_scale else model.head_dim,
            "attn_logit_softcapping": model.attention_softcap or None,
            "final_logit_softcapping": model.logit_softcap or None,
        }
    if model.experts is not None:
        values |= _expert_keys(model, model.experts)
    again = _read(values, "config.json")
    blocks = range(model.num_blocks)
    if [model.window_of(block) for block in blocks] == [again.window_of(block) for block in blocks]:
        model = replace(model, window_pattern=again.window_pattern)  # a longer one of the same blocks
    names = (declared.name for declared in fields(ModelConfig))
    pairs = ((name, getattr(model, name), getattr(again, name)) for name in names)
    faults = [
        f"{name}: {value} is not possible in a config.json of {hf.architecture}; use {read}"
        for name, value, read in pairs
        if value != read
    ]
    if faults:
        raise ConfigError("transformers configuration", faults)
    return values


def _rope_keys(model: ModelConfig) -> JsonMapping:
    values: JsonMapping = {"rope_theta": model.rope_theta}
    if model.rope_local_theta or model.family == "gemma3":
        values["rope_local_base_freq"] = model.rope_local_theta or model.rope_theta
    if model.rotary_fraction != 1:
        values["partial_rotary_factor"] = model.rotary_fraction
    scaling = model.rope_scaling
    if scaling is not None:
        table: JsonMapping = {"rope_type": scaling.method, "factor": scaling.factor}
        table |= {key: getattr(scaling, key) for key in _SCALING_KEYS[scaling.method]}
        if scaling.method != "linear":
            table["original_max_position_embeddings"] = scaling.original_max_seq_len
        if scaling.method == "yarn" and scaling.attention_factor:
            table["attention_factor"] = scaling.attention_factor
        values["rope_scaling"] = table
    return values


def _window_keys(model: ModelConfig, hf: HfFamily) -> JsonMapping:
    if hf.window == "none":
        return {}
    values: JsonMapping = {"sliding_window": model.sliding_window or None}
    if "use_sliding_window" in hf.defaults:
        values["use_sliding_window"] = model.sliding_window > 0
    if hf.window == "layers":
        slides = [model.window_of(block) > 0 for block in range(model.num_blocks)]
        values["layer_types"] = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]
    return values


def _expert_keys(model: ModelConfig, experts: Experts) -> JsonMapping:
    values: JsonMapping = {
        "num_experts_per_tok": experts.per_token, "output_router_logits": experts.balance_coefficient > 0,
        "router_aux_loss_coef": experts.balance_coefficient,
    }  # fmt: skip
    if model.family == "mixtral":
        return {**values, "num_local_experts": experts.count, "intermediate_size": experts.ffn_width}
    return {
        **values, "num_experts": experts.count, "moe_intermediate_size": experts.ffn_width,
        "norm_topk_prob": experts.normalizes, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Keys:
    """Values by LLaMA's keys; each fault is noted, and answered with a value that raises no other."""

    mapping: Mapping[str, JsonValue]
    defaults: Mapping[str, JsonValue]
    faults: list[str]
    path: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> JsonValue:
        """Return a value, else its class's default, else None."""
        key = self.renamed.get(key, key)
        return self.mapping.get(key, self.defaults.get(key))

    def refuse(self, key: str, sentence: str) -> None:
        name = self.renamed.get(key, key)
        self.faults.append(f"{self.path}{name}: {json.dumps(self.get(key))} is not supported; {sentence}")

    def integer(self, key: str, least: int = 1, missing: int | None = None) -> int:
        value = self.get(key)
        if value is None and missing is not None:
            return missing
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"an integer of at least {least} is required")
            return least
        return value

    def number(self, key: str, missing: float | None = None) -> float:
        value = self.get(key)
        if value is None and missing is not None:
            return missing
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            self.refuse(key, "a number of at least 0 is required")
            return 1.0
        return value

    def table(self, key: str, defaults: Mapping[str, JsonValue]) -> "_Keys":
        """Return the keys of an object; empty for null and missing ones."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            self.refuse(key, "an object or null is required")
            value = {}
        return _Keys(value or {}, defaults, self.faults, f"{self.path}{key}.")

    def __contains__(self, key: str) -> bool:
        return key in self.mapping


def _read(mapping: Mapping[str, JsonValue], source: str) -> ModelConfig:
    name, faults = _family(mapping, source), list[str]()
    parts, hf, path = FAMILIES[name], FAMILIES[name].hf, "text_config." if is_multimodal(mapping) else ""
    if path and not isinstance(mapping.get("text_config"), dict):
        raise ConfigError(source, ["text_config: must be an object; give the config.json that transformers wrote"])
    keys = _Keys(hf_text_config(mapping), hf.defaults, faults, path, hf.renamed)
    for key, value in hf.fixed.items():
        if keys.get(key) not in (None, value):
            keys.refuse(key, f"only {json.dumps(value)} is supported")
    activations = _ACTIVATIONS[parts.activation]
    if keys.get("hidden_act") not in (None, *activations):  # a list, if the file is damaged: no set holds it
        keys.refuse("hidden_act", f"only {' or '.join(activations)} is supported in {hf.architecture}")
    sizes = {ours: keys.integer(theirs) for ours, theirs in _SIZES.items() if ours != "ffn_width"}
    width, num_heads = sizes["width"], sizes["num_heads"]
    sizes["ffn_width"] = keys.integer(_SIZES["ffn_width"], missing=4 * width if name == "gpt2" else None)
    head_dim = keys.integer("head_dim", missing=width // num_heads)
    scalar = keys.number("query_pre_attn_scalar") if "query_pre_attn_scalar" in hf.defaults else head_dim
    window, pattern = _window(keys, hf, sizes["num_blocks"])
    theta, local_theta, fraction, scaling = _rope(keys, hf, sizes["max_seq_len"])
    softcaps = [
        keys.number(key, missing=0.0) if key in hf.defaults else 0.0
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    ]
    try:
        model = ModelConfig(
            family=name, **sizes, num_kv_heads=keys.integer("num_key_value_heads", missing=num_heads),
            dropout=_dropout(keys) if parts.has_dropout else 0.0, tied=keys.get("tie_word_embeddings") is True,
            norm_eps=keys.number("rms_norm_eps"), rope_theta=theta,
            head_size=0 if head_dim * num_heads == width else head_dim, rope_scaling=scaling,
            rope_local_theta=local_theta if window else 0.0, rotary_fraction=fraction, sliding_window=window,
            window_pattern=pattern, attention_softcap=softcaps[0], logit_softcap=softcaps[1],
            query_scale=0.0 if scalar in {0, head_dim} else scalar**-0.5,
            experts=_experts(keys, name) if parts.has_experts else None,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(source, faults or str(error).splitlines()) from None
    if faults:
        raise ConfigError(source, faults)
    return model


def _family(mapping: Mapping[str, JsonValue], source: str) -> Family:
    """Return the family; raises ``ConfigError``: no other key can be judged without it."""
    wholes = [spelling.architecture for spelling, _ in _spellings() if isinstance(spelling, HfMultimodal)]
    architectures, types = hf_architectures(), {spelling.model_type: name for spelling, name in _spellings()}
    for key, noun, known in (("architectures", "architecture", architectures), ("model_type", "model type", types)):
        value = mapping.get(key)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, str) and value in known:
            return known[value]
        if value is not None and ("text_config" in mapping or str(value).endswith("ForConditionalGeneration")):
            fault = (
                f"{key}: {noun} '{value}' is a multimodal model that is not supported; supported are "
                f"{', '.join(wholes)}, and the text models {', '.join(sorted({*architectures} - {*wholes}))}: use one "
                f"of these"
            )
            raise ConfigError(source, [fault])
        if value is not None:
            raise ConfigError(source, [f"{key}: {unknown_name(noun, str(value), known)}"])
    raise ConfigError(source, ["model_type: missing; give the config.json that transformers wrote"])


def _dropout(keys: _Keys) -> float:
    residual = keys.number("resid_pdrop")
    if keys.number("embd_pdrop") != residual:
        keys.refuse("embd_pdrop", f"all dropouts must be equal; set it to resid_pdrop, {residual}")
    return residual


def _window(keys: _Keys, hf: HfFamily, num_blocks: int) -> tuple[int, tuple[bool, ...]]:
    """Return the window and the shortest pattern of the blocks that have it."""
    is_off = hf.window == "none" or keys.get("use_sliding_window") is False or keys.get("sliding_window") is None
    slides = [] if is_off else [True] * num_blocks if hf.window == "all" else _sliding_blocks(keys, hf, num_blocks)
    if not any(slides):
        return 0, (True,)
    periods = range(1, num_blocks + 1)
    period = next(size for size in periods if slides == (slides[:size] * num_blocks)[:num_blocks])
    return keys.integer("sliding_window"), tuple(slides[:period])


def _sliding_blocks(keys: _Keys, hf: HfFamily, num_blocks: int) -> list[bool]:
    """Return whether each block slides: by its type, or as transformers fills in types that are missing."""
    types, known = keys.get("layer_types"), ("sliding_attention", "full_attention")
    if types is None and "sliding_window_pattern" in hf.defaults:
        every = keys.integer("sliding_window_pattern")
        return [(block + 1) % every > 0 for block in range(num_blocks)]
    if types is None:
        first = keys.integer("max_window_layers", least=0)
        return [block >= first for block in range(num_blocks)]
    if not isinstance(types, list) or len(types) != num_blocks or any(kind not in known for kind in types):
        keys.refuse("layer_types", f"{' or '.join(known)} is required for each of {num_blocks} blocks")
        return [False] * num_blocks
    return [kind == known[0] for kind in types]


def _rope(keys: _Keys, hf: HfFamily, max_seq_len: int) -> tuple[float, float, float, RopeScaling | None]:
    """Return theta, that of blocks with a window, the share of a head that turns, and the scaling."""
    if "rope_theta" not in hf.defaults:
        return 10000.0, 0.0, 1.0, None
    older = {key: keys.get(key) for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")}
    older_local = {"rope_theta": keys.get("rope_local_base_freq")}
    rope = keys.table("rope_scaling" if keys.get("rope_scaling") is not None else "rope_parameters", older)
    local = _Keys({}, older_local, [])
    if "full_attention" in rope or "sliding_attention" in rope:
        rope, local = rope.table("full_attention", older), rope.table("sliding_attention", older_local)
    fraction = rope.number("partial_rotary_factor", missing=1.0)
    if fraction != 1 and hf.model_type != "phi3":
        rope.refuse("partial_rotary_factor", f"partial rotary embedding is not supported in {hf.architecture}")
        fraction = 1.0
    theta, scaling, local_theta = rope.number("rope_theta"), _scaling(rope, max_seq_len), 0.0
    if "rope_local_base_freq" in hf.defaults:
        local_theta = local.number("rope_theta")
        if local.get("rope_type") not in (None, "default"):
            local.refuse("rope_type", "blocks with a sliding window support only the default")
    return theta, 0.0 if scaling is None and local_theta == theta else local_theta, fraction, scaling


def _scaling(rope: _Keys, max_seq_len: int) -> RopeScaling | None:
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    method = rope.get(key)
    if method in (None, "default"):
        return None
    if method not in ("linear", "llama3", "yarn"):
        rope.refuse(key, "supported: default, linear, llama3, yarn")
        return None
    original = rope.integer("original_max_position_embeddings", missing=max_seq_len)
    factor = rope.number("factor", missing=max_seq_len / original if method == "yarn" else None)
    settings: dict[str, Any] = {"method": method, "factor": factor}
    if method != "linear":
        settings["original_max_seq_len"] = original
    given = (name for name in _SCALING_KEYS[method] if method == "llama3" or rope.get(name))
    settings |= {name: rope.number(name) for name in given}
    try:
        if method == "yarn":
            settings["attention_factor"] = _attention_factor(rope, factor)
        return RopeScaling(**settings)
    except ValueError as error:
        rope.refuse(key, str(error).replace("\n", "; "))
        return None


def _attention_factor(rope: _Keys, factor: float) -> float:
    if rope.get("truncate") is False:
        rope.refuse("truncate", "only true (whole bounds) is supported")
    if rope.get("attention_factor") is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (0.1 * rope.number(key) * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim"))
        return above / below  # 1 + 0.1 m ln(factor), of both
    return rope.number("attention_factor", missing=0.0)


def _experts(keys: _Keys, name: Family) -> Experts:
    is_mixtral = name == "mixtral"
    # transformers maps one of these names on the other, and writes either
    count = keys.integer("num_experts" if keys.get("num_experts") is not None else "num_local_experts")
    per_token = keys.integer("num_experts_per_tok")
    if per_token > count:
        keys.refuse("num_experts_per_tok", f"at most the number of experts ({count}) is allowed")
    return Experts(
        count=count, per_token=min(per_token, count),
        ffn_width=keys.integer("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        normalizes=is_mixtral or keys.get("norm_topk_prob") is True,
        # transformers adds the loss only where it puts out what the router said
        balance_coefficient=keys.number("router_aux_loss_coef") if keys.get("output_router_logits") is True else 0.0,
    )  # fmt: skip
