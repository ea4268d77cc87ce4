"""Shapes from config.json and back, in transformers' own spelling, and by whatever else names a model."""

import json
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import NoReturn
from urllib.error import URLError
from urllib.request import Request

import pytest
import torch
from huggingface_hub.constants import ENDPOINT
from transformers import AutoConfig, AutoModelForCausalLM

from hybridtrain.config.encode import JsonMapping, to_toml
from hybridtrain.errors import ConfigError
from hybridtrain.models.find_model import find_model
from hybridtrain.models.hf_config import hf_config_of, model_config_from_hf
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.models.model_spec import ModelSpec
from tiny_models import FAMILIES, GPT2_UNTIED, LLAMA_GROUPED

EVERY = {**PRESETS, **FAMILIES}


def refused(values: JsonMapping) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        model_config_from_hf(values)
    return raised.value.faults


@pytest.mark.parametrize("name", EVERY)
def test_what_is_written_is_read_again(name: str) -> None:
    values = json.loads(json.dumps(hf_config_of(EVERY[name])))
    assert model_config_from_hf(values) == EVERY[name]


@pytest.mark.parametrize("name", EVERY)
def test_what_transformers_makes_of_it_is_read_too(name: str) -> None:
    values = hf_config_of(EVERY[name])
    theirs = AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
    assert model_config_from_hf(json.loads(json.dumps(theirs))) == EVERY[name]


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_counts_the_same_parameters(name: str) -> None:
    shape = replace(PRESETS[name], num_blocks=2)  # blocks are alike
    values = hf_config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_params


QWEN3_8B: JsonMapping = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
"""As transformers 4.51 wrote it."""


def test_a_published_file_is_the_preset() -> None:
    assert model_config_from_hf(QWEN3_8B) == PRESETS["qwen3-8b"]


def test_what_the_decoder_does_not_have_is_all_listed() -> None:
    scaling: JsonMapping = {"rope_type": "longrope", "factor": 4.0}
    values = QWEN3_8B | {"attention_bias": True, "hidden_act": "relu", "rope_scaling": scaling, "vocab_size": "many"}
    assert refused(values) == (
        "attention_bias: true is not supported; only false is supported",
        'hidden_act: "relu" is not supported; only silu or swish is supported in Qwen3ForCausalLM',
        'vocab_size: "many" is not supported; an integer of at least 1 is required',
        'rope_scaling.rope_type: "longrope" is not supported; supported: default, linear, llama3, yarn',
    )


def test_blocks_with_and_without_experts_are_refused() -> None:
    values = hf_config_of(PRESETS["qwen3-30b-a3b"]) | {"mlp_only_layers": [0], "num_experts_per_tok": 129}
    assert refused(values) == (
        "mlp_only_layers: [0] is not supported; only [] is supported",
        "num_experts_per_tok: 129 is not supported; at most the number of experts (128) is allowed",
    )


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"architectures": ["Qwen4ForCausalLM"]}, "architectures: architecture 'Qwen4ForCausalLM' is unknown; did you"),
        ({"model_type": "lama"}, "model_type: model type 'lama' is unknown; did you mean 'llama'?"),
        ({}, "model_type: missing; give the config.json that transformers wrote"),
    ],
)
def test_an_unknown_kind_is_answered_with_the_nearest_name(values: JsonMapping, fault: str) -> None:
    assert refused(values)[0].startswith(fault)


def test_faults_of_the_shape_itself_are_told() -> None:
    assert refused(QWEN3_8B | {"num_key_value_heads": 5}) == ("num_kv_heads: 5 must divide num_heads (32)",)


def test_what_transformers_cannot_be_told_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logit_softcap: 3\.0 is not possible in a config\.json of Llama"):
        hf_config_of(replace(LLAMA_GROUPED, logit_softcap=3.0))


def folder_of(config: ModelConfig, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(hf_config_of(config)))
    return folder


def test_a_model_is_found_by_preset_file_and_folder(tmp_path: Path) -> None:
    gemma = FAMILIES["gemma3"]
    folder_of(gemma, tmp_path)
    (tmp_path / "mine.toml").write_text(to_toml(GPT2_UNTIED))
    assert find_model("qwen3-8b") is PRESETS["qwen3-8b"]
    assert find_model(str(tmp_path / "mine.toml")) == GPT2_UNTIED
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json")) == gemma
    assert ModelSpec(folder=tmp_path).resolve() == gemma


def test_of_a_model_on_the_hub_the_configuration_alone_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(FAMILIES["olmo2"], tmp_path)
    asked = []

    def fetch(name: str, file: str) -> str:
        asked.append((name, file))
        return str(tmp_path / file)

    def answer(request: Request, timeout: float) -> BytesIO:
        assert (request.full_url, request.method) == (f"{ENDPOINT}/allenai/tiny-olmo/resolve/main/config.json", "HEAD")
        assert timeout < 10
        return BytesIO()

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    monkeypatch.setattr("hybridtrain.models.find_model.urlopen", answer)
    assert find_model("allenai/tiny-olmo") == FAMILIES["olmo2"]
    assert asked == [("allenai/tiny-olmo", "config.json")]
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda _, file: str(tmp_path / file))
    assert find_model("allenai/tiny-olmo") == FAMILIES["olmo2"]
    assert len(asked) == 1, "kept from before"


def test_without_the_hub_a_name_there_is_one_clear_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, timeout: float = 0) -> NoReturn:
        raise URLError("no route") if timeout else OSError("404\nand more")

    def fault(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            find_model(name)
        return caught.value.faults[0]

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    monkeypatch.setattr("hybridtrain.models.find_model.urlopen", lambda *_, **__: BytesIO())
    assert fault("a/b").startswith("'a/b' is not a folder here, and the hub does not have it (404); give a preset (")
    monkeypatch.setattr("hybridtrain.models.find_model.urlopen", fail)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)  # it would retry for half a minute
    told = "'Qwen/Qwen3-8B' is not a folder here, and the hub cannot be reached (no route); give the preset qwen3-8b"
    assert fault("Qwen/Qwen3-8B") == f"{told}, or a folder that holds the model's config.json"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "the hub cannot be reached (HF_HUB_OFFLINE is set)" in fault("a/b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "the package huggingface_hub is not installed (pip install it)" in fault("a/b")


@pytest.mark.parametrize(("text", "fault"), [("[1]", "is not a JSON object"), ("{", "is not JSON")])
def test_a_file_that_is_none_is_refused(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=fault):
        find_model(str(tmp_path))
    with pytest.raises(ValueError, match=f"folder: .*{fault}"):
        ModelSpec(folder=tmp_path)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_model(str(tmp_path))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="model 'qwen3-8' is unknown; did you mean 'qwen3-8b'"):
        find_model("qwen3-8")


@pytest.mark.parametrize("values", [{"rope_scaling": {"rope_type": ["x"]}}, {"hidden_act": ["silu"]}])
def test_a_list_where_a_name_belongs_is_a_fault(values: JsonMapping) -> None:
    assert "is not supported; " in refused({**QWEN3_8B, **values})[0]
