"""Model shapes from Hugging Face's ``config.json`` and back, as transformers 4 and 5 spell it.

A key that transformers' own class of the family does not read is not read here either. Of a model that sees images
too, the text part alone is read. Dropout of attention weights is
passed over: no decoder here has it (ARCHITECTURE.md).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, Literal

from hybridtrain.config.decode import missing_path
from hybridtrain.config.encode import JsonMapping, JsonValue
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.models.families import FAMILIES, Architecture, Family
from hybridtrain.models.model_config import Experts, ModelConfig, RopeScaling
from hybridtrain.plain_file import read_plain

_SIZES: Final = {
    "vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings", "num_blocks": "num_hidden_layers",
    "width": "hidden_size", "num_heads": "num_attention_heads", "ffn_width": "intermediate_size",
}  # fmt: skip
_GPT2_SIZES: Final = {
    "vocab_size": "vocab_size", "max_seq_len": "n_positions", "num_blocks": "n_layer", "width": "n_embd",
    "num_heads": "n_head", "ffn_width": "n_inner",
}  # fmt: skip
_ACTIVATIONS: Final = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new")}
"""Names that transformers has for ours; the first is written."""

_BETAS: Final = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Of YaRN, where they are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfMultimodal:
    """transformers' class of a family's decoder and parts beside it; the decoder's keys lie in ``text_config``."""

    architecture: str
    model_type: str
    is_tied: bool
    """Where ``tie_word_embeddings`` is missing, which lies outside of ``text_config``."""
    text: Mapping[str, JsonValue]
    """Sizes where they are missing: files on the hub leave out what is the text class's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfFamily:
    """How transformers' configuration class of a family is read."""

    architecture: str
    model_type: str
    sizes: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    """Our field and transformers' key."""
    activation_key: str = "hidden_act"
    norm_eps_key: str = "rms_norm_eps"
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    """Of the class, where a key is missing and that is not a fault."""
    fixed: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keys that change what is computed, and the only value that the decoder has; missing or null is as good."""
    window: Literal["none", "all", "layers"] = "none"
    """Which blocks a ``sliding_window`` is in: all, or those that the layers' types, or older keys, name."""
    multimodal: HfMultimodal | None = None


_LLAMA: Final[Mapping[str, JsonValue]] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
_GEMMA: Final[Mapping[str, JsonValue]] = {
    **_LLAMA, "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "num_key_value_heads": 4,
    "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_QWEN: Final[Mapping[str, JsonValue]] = {
    **_LLAMA, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_NO_BIAS: Final[Mapping[str, JsonValue]] = {"attention_bias": False}

HF_FAMILIES: Final[Mapping[Family, HfFamily]] = {
    "gpt2": HfFamily(
        architecture="GPT2LMHeadModel", model_type="gpt2", sizes=_GPT2_SIZES, activation_key="activation_function",
        norm_eps_key="layer_norm_epsilon",
        defaults={
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new",
            "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        },
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "llama": HfFamily(
        architecture="LlamaForCausalLM", model_type="llama", defaults=_LLAMA, fixed={**_NO_BIAS, "mlp_bias": False}
    ),
    "mistral": HfFamily(
        architecture="MistralForCausalLM", model_type="mistral", window="all",
        defaults={**_LLAMA, "sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "qwen2": HfFamily(architecture="Qwen2ForCausalLM", model_type="qwen2", defaults=_QWEN, window="layers"),
    "qwen3": HfFamily(
        architecture="Qwen3ForCausalLM", model_type="qwen3", defaults={**_QWEN, "head_dim": 128}, fixed=_NO_BIAS,
        window="layers",
    ),
    "gemma2": HfFamily(
        architecture="Gemma2ForCausalLM", model_type="gemma2", activation_key="hidden_activation", window="layers",
        defaults={
            **_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2
        },
        fixed={**_NO_BIAS, "use_bidirectional_attention": False},
    ),
    "gemma3": HfFamily(
        architecture="Gemma3ForCausalLM", model_type="gemma3_text", activation_key="hidden_activation",
        window="layers",
        defaults={
            **_GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        fixed={**_NO_BIAS, "use_bidirectional_attention": False},
        multimodal=HfMultimodal(
            architecture="Gemma3ForConditionalGeneration", model_type="gemma3", is_tied=True,
            text={  # of transformers' Gemma3TextConfig
                "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
                "num_attention_heads": 8, "max_position_embeddings": 131072,
            },
        ),
    ),
    "phi3": HfFamily(
        architecture="Phi3ForCausalLM", model_type="phi3", window="all",
        defaults={**_LLAMA, "rms_norm_eps": 1e-5, "sliding_window": None}, fixed={"resid_pdrop": 0, "embd_pdrop": 0},
    ),
    "olmo2": HfFamily(
        architecture="Olmo2ForCausalLM", model_type="olmo2", defaults={**_LLAMA, "rms_norm_eps": 1e-5}, fixed=_NO_BIAS
    ),
    "mixtral": HfFamily(
        architecture="MixtralForCausalLM", model_type="mixtral", window="all",
        defaults={
            **_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_key_value_heads": 8,
            "num_experts_per_tok": 2, "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
        fixed={"router_jitter_noise": 0},
    ),
    "qwen3_moe": HfFamily(
        architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", window="all",
        defaults={
            **_QWEN, "num_experts_per_tok": 8, "norm_topk_prob": False, "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
        fixed={**_NO_BIAS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}  # fmt: skip


def model_config_from_hf(source: Mapping[str, JsonValue] | Path) -> ModelConfig:
    """Return the shape of a transformers model.

    Args:
        source: What its ``config.json`` holds, or the path of that file or of its folder.

    Raises:
        ConfigError: the file cannot be read, or asks for what the decoder does not have; each fault names its key.
    """
    if not isinstance(source, Path):
        return _read(source, "config.json")
    return _read(read_hf_config(source), str(source / "config.json" if source.is_dir() else source))


def read_hf_config(source: Path) -> dict[str, JsonValue]:
    """Return what a ``config.json``, or that of a folder, holds; raises ``ConfigError``: it cannot be read."""
    path = source / "config.json" if source.is_dir() else source
    try:
        mapping = json.loads(read_plain(path))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(str(path), [missing_path(path)]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read ({error.strerror}); check its permissions"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), [f"is not JSON ({error}); give the file that transformers wrote"]) from error
    if not isinstance(mapping, dict):
        raise ConfigError(str(path), ["holds no JSON object; give the file that transformers wrote"])
    return mapping


def hf_text_config(mapping: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Return ``config.json`` of the text part of a multimodal model; what is text alone is returned as it is.

    Args:
        mapping: What ``model_config_from_hf`` takes.
    """
    family, text = _whole(mapping), mapping.get("text_config")
    if family is None or family.multimodal is None or not isinstance(text, dict):
        return mapping
    tokens = {key: mapping[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in mapping}
    return {
        **family.multimodal.text, **text, **tokens,
        "architectures": [family.architecture], "model_type": family.model_type,
        "tie_word_embeddings": mapping.get("tie_word_embeddings", family.multimodal.is_tied),
    }  # fmt: skip


def is_multimodal(mapping: Mapping[str, JsonValue]) -> bool:
    """Return whether ``config.json`` is that of a model with parts beside the text model that is read of it."""
    return _whole(mapping) is not None


def _whole(mapping: Mapping[str, JsonValue]) -> HfFamily | None:
    """Return the family of the text part of a multimodal model."""
    found = mapping.get("architectures") or mapping.get("model_type")
    if isinstance(found, list):
        found = found[0]
    for family in HF_FAMILIES.values():
        whole = family.multimodal
        if whole is not None and found in (whole.architecture, whole.model_type):
            return family
    return None


def hf_architectures() -> dict[str, Family]:
    """Return the architectures that are read, by transformers' names, and our families."""
    found = {family.architecture: name for name, family in HF_FAMILIES.items()}
    return found | {each.multimodal.architecture: name for name, each in HF_FAMILIES.items() if each.multimodal}


def hf_config_of(model: ModelConfig) -> JsonMapping:
    """Return ``config.json`` of a shape, without the type of the weights and the tokens of a tokenizer.

    Raises:
        ConfigError: transformers' class of the family has no key for what is asked.
    """
    family = HF_FAMILIES[model.family]
    values: JsonMapping = {"architectures": [family.architecture], "model_type": family.model_type}
    values |= {theirs: getattr(model, ours) for ours, theirs in family.sizes.items()}
    values |= {
        family.norm_eps_key: model.norm_eps, "tie_word_embeddings": model.tied,
        family.activation_key: _ACTIVATIONS[model.architecture.activation][0],
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if model.family == "gpt2":
        values |= {"activation_function": "gelu_new", "attn_pdrop": 0.0}
        values |= {"resid_pdrop": model.dropout, "embd_pdrop": model.dropout}
    else:
        values |= {"num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}
        values |= {"attention_dropout": 0.0, **_rope_keys(model)}
        values |= _window_keys(model, family)
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
    faults = [
        f"{one.name}: {getattr(model, one.name)} cannot be told in a config.json of {family.architecture}; use "
        f"{getattr(again, one.name)}"
        for one in fields(ModelConfig)
        if getattr(model, one.name) != getattr(again, one.name)
    ]
    if faults:
        raise ConfigError("transformers configuration", faults)
    return values


def _rope_keys(model: ModelConfig) -> JsonMapping:
    values: JsonMapping = {"rope_theta": model.rope_theta}
    if model.rope_local_theta:
        values["rope_local_base_freq"] = model.rope_local_theta
    elif model.family == "gemma3":
        values["rope_local_base_freq"] = model.rope_theta
    if model.rotary_fraction != 1:
        values["partial_rotary_factor"] = model.rotary_fraction
    scaling = model.rope_scaling
    if scaling is not None:
        keys: dict[str, list[str]] = {
            "linear": [], "llama3": ["low_freq_factor", "high_freq_factor"], "yarn": ["beta_fast", "beta_slow"]
        }  # fmt: skip
        found: JsonMapping = {"rope_type": scaling.method, "factor": scaling.factor}
        found |= {key: getattr(scaling, key) for key in keys[scaling.method]}
        if scaling.method != "linear":
            found["original_max_position_embeddings"] = scaling.original_max_seq_len
        if scaling.method == "yarn" and scaling.attention_factor:
            found["attention_factor"] = scaling.attention_factor
        values["rope_scaling"] = found
    return values


def _window_keys(model: ModelConfig, family: HfFamily) -> JsonMapping:
    if family.window == "none":
        return {}
    values: JsonMapping = {"sliding_window": model.sliding_window or None}
    if "use_sliding_window" in family.defaults:
        values["use_sliding_window"] = model.sliding_window > 0
    if family.window == "layers":
        slides = [model.window_of(block) > 0 for block in range(model.num_blocks)]
        values["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
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


class _Keys:
    """Values by their keys; each fault is noted, and answered with a value that raises no other."""

    def __init__(
        self, mapping: Mapping[str, JsonValue], defaults: Mapping[str, JsonValue], faults: list[str], path: str = ""
    ) -> None:
        self._mapping = mapping
        self._defaults = defaults
        self._faults = faults
        self._path = path

    def get(self, key: str) -> JsonValue:
        """Return a value, or the default of its class, or None."""
        return self._mapping.get(key, self._defaults.get(key))

    def refuse(self, key: str, sentence: str) -> None:
        """Note a value that cannot be."""
        self._faults.append(f"{self._path}{key}: {json.dumps(self.get(key))} cannot be; {sentence}")

    def integer(self, key: str, least: int = 1) -> int:
        """Return a whole number."""
        found = self.get(key)
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            self.refuse(key, f"a whole number of at least {least} is required")
            return least
        return found

    def number(self, key: str) -> float:
        """Return a number of at least 0."""
        found = self.get(key)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
            self.refuse(key, "a number of at least 0 is required")
            return 1.0
        return found

    def table(self, key: str) -> dict[str, JsonValue]:
        """Return an object; null and a missing one are empty."""
        found = self.get(key)
        if found is None or isinstance(found, dict):
            return found or {}
        self.refuse(key, "an object or null is required")
        return {}

    def inner(self, key: str, defaults: Mapping[str, JsonValue]) -> "_Keys":
        """Return the keys of an object."""
        return _Keys(self.table(key), defaults, self._faults, f"{self._path}{key}.")


def _read(mapping: Mapping[str, JsonValue], source: str) -> ModelConfig:
    """Return the shape that a configuration tells; raises ``ConfigError``."""
    name = _family(mapping, source)
    family, faults, path = HF_FAMILIES[name], list[str](), ""
    if is_multimodal(mapping):
        path = "text_config."
        if not isinstance(mapping.get("text_config"), dict):
            raise ConfigError(source, ["text_config: must be an object; give the config.json that transformers wrote"])
    keys = _Keys(hf_text_config(mapping), family.defaults, faults, path)
    _check_fixed(keys, family, FAMILIES[name])
    sizes = {ours: keys.integer(theirs) for ours, theirs in family.sizes.items() if theirs != "n_inner"}
    if name == "gpt2":
        sizes["ffn_width"] = 4 * sizes["width"] if keys.get("n_inner") is None else keys.integer("n_inner")
    num_heads = sizes["num_heads"]
    head_dim = sizes["width"] // num_heads if keys.get("head_dim") is None else keys.integer("head_dim")
    scalar = keys.number("query_pre_attn_scalar") if "query_pre_attn_scalar" in family.defaults else head_dim
    window, pattern = _window(keys, family, sizes["num_blocks"])
    theta, local_theta, fraction, scaling = _rope(keys, family, sizes["max_seq_len"])
    try:
        model = ModelConfig(
            family=name, **sizes,
            num_kv_heads=num_heads if keys.get("num_key_value_heads") is None else keys.integer("num_key_value_heads"),
            dropout=_dropout(keys) if FAMILIES[name].has_dropout else 0.0,
            tied=keys.get("tie_word_embeddings") is True, norm_eps=keys.number(family.norm_eps_key),
            rope_theta=theta, head_size=0 if head_dim * num_heads == sizes["width"] else head_dim,
            rope_scaling=scaling, rope_local_theta=local_theta if window else 0.0, rotary_fraction=fraction,
            sliding_window=window, window_pattern=pattern,
            attention_softcap=_softcap(keys, family, "attn_logit_softcapping"),
            logit_softcap=_softcap(keys, family, "final_logit_softcapping"),
            query_scale=0.0 if scalar in {0, head_dim} else scalar**-0.5,
            experts=_experts(keys, name) if FAMILIES[name].has_experts else None,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(source, faults or str(error).splitlines()) from None
    if faults:
        raise ConfigError(source, faults)
    return model


def _family(mapping: Mapping[str, JsonValue], source: str) -> Family:
    """Return which family this is; raises ``ConfigError``: no other key can be judged without it."""
    types = {each.model_type: name for name, each in HF_FAMILIES.items()}
    types |= {each.multimodal.model_type: name for name, each in HF_FAMILIES.items() if each.multimodal}
    named = hf_architectures()
    for key, what, known in (("architectures", "architecture", named), ("model_type", "model type", types)):
        found = mapping.get(key)
        if isinstance(found, list):
            found = found[0] if found else None
        if isinstance(found, str) and found in known:
            return known[found]
        if found is not None and ("text_config" in mapping or str(found).endswith("ForConditionalGeneration")):
            wholes = [each.multimodal.architecture for each in HF_FAMILIES.values() if each.multimodal]
            fault = (
                f"{key}: {what} '{found}' has parts beside its text model and is not read; of such models "
                f"{', '.join(wholes)} is, of text models {', '.join(sorted({*named} - {*wholes}))}: give one of these"
            )
            raise ConfigError(source, [fault])
        if found is not None:
            raise ConfigError(source, [f"{key}: {unknown_name(what, str(found), known)}"])
    raise ConfigError(source, ["model_type: missing; give the config.json that transformers wrote"])


def _check_fixed(keys: _Keys, family: HfFamily, parts: Architecture) -> None:
    for key, value in family.fixed.items():
        if keys.get(key) not in (None, value):
            keys.refuse(key, f"the decoder has {json.dumps(value)} alone")
    allowed = _ACTIVATIONS[parts.activation]
    if keys.get(family.activation_key) not in (None, *allowed):  # a list, if the file is damaged: no set holds it
        keys.refuse(family.activation_key, f"the decoder of {family.architecture} has {' or '.join(allowed)} alone")


def _dropout(keys: _Keys) -> float:
    residual = keys.number("resid_pdrop")
    if keys.number("embd_pdrop") != residual:
        keys.refuse("embd_pdrop", f"the decoder has one dropout; make it resid_pdrop, {residual}")
    return residual


def _softcap(keys: _Keys, family: HfFamily, key: str) -> float:
    return 0.0 if key not in family.defaults or keys.get(key) is None else keys.number(key)


def _window(keys: _Keys, family: HfFamily, num_blocks: int) -> tuple[int, tuple[bool, ...]]:
    """Return the window and the shortest pattern of the blocks that have it."""
    is_off = family.window == "none" or keys.get("use_sliding_window") is False
    if is_off or keys.get("sliding_window") is None:
        return 0, (True,)
    slides = [True] * num_blocks if family.window == "all" else _sliding_blocks(keys, family, num_blocks)
    if not any(slides):
        return 0, (True,)
    periods = range(1, num_blocks + 1)
    period = next(size for size in periods if slides == (slides[:size] * num_blocks)[:num_blocks])
    return keys.integer("sliding_window"), tuple(slides[:period])


def _sliding_blocks(keys: _Keys, family: HfFamily, num_blocks: int) -> list[bool]:
    """Return which blocks slide: by their types, or as transformers fills in types that are missing."""
    types = keys.get("layer_types")
    if types is None and "sliding_window_pattern" in family.defaults:
        every = keys.integer("sliding_window_pattern")
        return [(block + 1) % every > 0 for block in range(num_blocks)]
    if types is None:
        first = keys.integer("max_window_layers", least=0)
        return [block >= first for block in range(num_blocks)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_blocks or any(one not in known for one in types):
        keys.refuse("layer_types", f"{' or '.join(known)} is required for each of {num_blocks} blocks")
        return [False] * num_blocks
    return [one == known[0] for one in types]


def _rope(keys: _Keys, family: HfFamily, max_seq_len: int) -> tuple[float, float, float, RopeScaling | None]:
    """Return theta, that of blocks with a window, the share of a head that turns, and the scaling."""
    if "rope_theta" not in family.defaults:
        return 10000.0, 0.0, 1.0, None
    name = "rope_scaling" if keys.get("rope_scaling") is not None else "rope_parameters"
    older = {key: keys.get(key) for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")}
    rope = keys.inner(name, older)
    local = _Keys({}, {"rope_theta": keys.get("rope_local_base_freq")}, [])
    if "full_attention" in keys.table(name) or "sliding_attention" in keys.table(name):
        local = rope.inner("sliding_attention", {"rope_theta": keys.get("rope_local_base_freq")})
        rope = rope.inner("full_attention", older)
    fraction = 1.0 if rope.get("partial_rotary_factor") is None else rope.number("partial_rotary_factor")
    if fraction != 1 and family.model_type != "phi3":
        rope.refuse("partial_rotary_factor", f"heads of {family.architecture} turn as a whole")
        fraction = 1.0
    theta, scaling, local_theta = rope.number("rope_theta"), _scaling(rope, max_seq_len), 0.0
    if "rope_local_base_freq" in family.defaults:
        local_theta = local.number("rope_theta")
        if local.get("rope_type") not in (None, "default"):
            local.refuse("rope_type", "blocks with a window have the default alone")
    return theta, 0.0 if scaling is None and local_theta == theta else local_theta, fraction, scaling


def _scaling(rope: _Keys, max_seq_len: int) -> RopeScaling | None:
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    method = rope.get(key)
    if method in (None, "default"):
        return None
    if method not in ("linear", "llama3", "yarn"):
        rope.refuse(key, "default, linear, llama3 and yarn can be run")
        return None
    original = max_seq_len
    if rope.get("original_max_position_embeddings") is not None:
        original = rope.integer("original_max_position_embeddings")
    is_told = method != "yarn" or rope.get("factor") is not None
    factor = rope.number("factor") if is_told else max_seq_len / original
    try:
        if method == "linear":
            return RopeScaling(method="linear", factor=factor)
        if method == "llama3":
            return RopeScaling(
                method="llama3", factor=factor, original_max_seq_len=original,
                low_freq_factor=rope.number("low_freq_factor"), high_freq_factor=rope.number("high_freq_factor"),
            )  # fmt: skip
        return _yarn(rope, factor, original)
    except ValueError as error:
        rope.refuse(key, str(error).replace("\n", "; "))
        return None


def _yarn(rope: _Keys, factor: float, original: int) -> RopeScaling:
    if rope.get("truncate") is False:
        rope.refuse("truncate", "the bounds of the passage are whole here")
    attention_factor = 0.0
    if rope.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):  # 1 + 0.1 m ln(factor), of both
        above, below = (0.1 * rope.number(key) * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim"))
        attention_factor = above / below
    beta_fast, beta_slow = (rope.number(key) if rope.get(key) else least for key, least in _BETAS.items())
    return RopeScaling(
        method="yarn", factor=factor, original_max_seq_len=original, beta_fast=beta_fast, beta_slow=beta_slow,
        attention_factor=attention_factor,
    )  # fmt: skip


def _experts(keys: _Keys, name: Family) -> Experts:
    is_mixtral = name == "mixtral"
    # transformers maps one of these names on the other, and writes either
    count = keys.integer("num_experts" if keys.get("num_experts") is not None else "num_local_experts")
    per_token = keys.integer("num_experts_per_tok")
    if per_token > count:
        keys.refuse("num_experts_per_tok", f"at most the number of experts, {count}, is allowed")
    return Experts(
        count=count, per_token=min(per_token, count),
        ffn_width=keys.integer("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        normalizes=is_mixtral or keys.get("norm_topk_prob") is True,
        # transformers adds the loss only where it puts out what the router said
        balance_coefficient=keys.number("router_aux_loss_coef") if keys.get("output_router_logits") is True else 0.0,
    )  # fmt: skip
