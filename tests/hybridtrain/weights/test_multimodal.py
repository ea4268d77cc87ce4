"""Gemma 3 with a vision tower, as the hub has it: the text part is read, and left as a text model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig

from hybridtrain.config.encode import JsonMapping
from hybridtrain.errors import ConfigError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.families import FAMILIES as ARCHITECTURES
from hybridtrain.models.hf_config import hf_config_of, model_config_from_hf
from hybridtrain.models.model_config import PRESETS, ModelConfig
from hybridtrain.plan.compose import compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import TrainerConfig
from hybridtrain.weights.export import export_folder
from hybridtrain.weights.hf_source import ONE_FILE, open_folder
from tiny_models import FAMILIES

TEXT = FAMILIES["gemma3"]
HEAD = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TOKENS_BT = torch.arange(34).view(2, 17)
EAGER = {"attn_implementation": "eager"}


def as_on_the_hub(name: str) -> str:
    """Return the name that transformers 4 wrote, and 5 writes again."""
    if name.startswith("lm_head."):
        return "language_model." + name
    return name.replace("model.language_model.", "language_model.model.").removeprefix("model.")


def as_in_memory(name: str) -> str:
    """Return the name in transformers' state dict."""
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    hub = as_on_the_hub(name)
    return name if name.startswith("lm_head.") else "model." + hub.replace("language_model.model.", "language_model.")


SPELLINGS: dict[str, Callable[[str], str]] = {
    "as transformers writes": str, "hub": as_on_the_hub, "memory": as_in_memory
}  # fmt: skip


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that transformers writes of a tiny random model."""
    values: dict[str, Any] = hf_config_of(TEXT)
    config = Gemma3Config(
        text_config=values, vision_config=VISION, tie_word_embeddings=request.param, mm_tokens_per_image=4,
        image_token_index=98, boi_token_index=99, eoi_token_index=100, eos_token_id=[1, 106],
    )  # fmt: skip
    made = Gemma3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    folder = tmp_path_factory.mktemp("multimodal")
    made.save_pretrained(folder)
    return folder


def spelled(folder: Path, name_of: Callable[[str], str], target: Path) -> tuple[Path, list[str]]:
    """Copy a folder with tensors under other names, which are returned too."""
    target.mkdir()
    tensors = {name_of(name): values for name, values in load_file(folder / ONE_FILE).items()}
    save_file(tensors, target / ONE_FILE, metadata={"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target, list(tensors)


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS_BT).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_text_part_is_read_and_leaves_as_a_text_model(spelling: str, saved: Path, tmp_path: Path) -> None:
    folder, names = spelled(saved, SPELLINGS[spelling], tmp_path / "source")
    starts = ("model.language_model.", "lm_head.") if spelling == "memory" else ("language_model.",)
    beside = [name for name in names if "vision_tower." in name or "multi_modal_projector." in name]
    if spelling != "as transformers writes":
        assert all(name.startswith(starts) for name in names if name not in beside)
    theirs, loading = Gemma3ForConditionalGeneration.from_pretrained(folder, output_loading_info=True, **EAGER)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    expected = logits_of(theirs)

    config = model_config_from_hf(folder)
    source = open_folder(folder, config)
    num_bytes = sum(4 * each.numel() for name, each in load_file(folder / ONE_FILE).items() if name in beside)
    told = f"{len(beside)} tensors of {num_bytes / 1024:.2f} KiB (multi_modal_projector, vision_tower)"
    assert source.left_out == f"only the text model is read; ignored: {told}"

    trainer = Trainer(config, compose([]), TrainerConfig(), DirectTransfer(torch.device("cpu")), source=source)
    trainer.model.eval()
    with torch.no_grad():
        ours = trainer.executor.forward(TOKENS_BT)
    assert (ours - expected).abs().max() < 2e-5 * expected.abs().max()  # sums in another order

    export_folder(trainer, tmp_path / "out", dtype=torch.float32, source_folder=folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **EAGER)
    assert type(again).__name__ == "Gemma3ForCausalLM"
    assert again.config.eos_token_id == [1, 106]
    assert torch.equal(logits_of(again), expected)
    assert model_config_from_hf(tmp_path / "out") == config
    assert not open_folder(tmp_path / "out", config).left_out


def hub_file(config: ModelConfig) -> JsonMapping:
    """Return config.json as transformers 4 wrote it: without what is a class's default."""
    defaults = Gemma3TextConfig().to_dict() | {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    values = hf_config_of(config)
    del values["layer_types"]
    text = {key: value for key, value in values.items() if key != "architectures" and value != defaults.get(key)}
    return HEAD | {"text_config": text | {"model_type": "gemma3_text"}, "vision_config": {}}


@pytest.mark.parametrize("name", ["gemma-3-4b", "gemma-3-12b", "gemma-3-27b"])
def test_what_a_file_of_the_hub_leaves_out_is_the_text_classes_default(name: str) -> None:
    values = hub_file(PRESETS[name])
    assert "vocab_size" not in values["text_config"]  # type: ignore[operator]
    assert model_config_from_hf(values) == PRESETS[name]
    del values["architectures"]
    assert model_config_from_hf(values) == PRESETS[name]


def test_every_size_of_the_text_class_is_transformers_own() -> None:
    hf = ARCHITECTURES["gemma3"].hf
    multimodal = hf.multimodal
    assert multimodal is not None
    theirs = Gemma3TextConfig().to_dict()
    assert multimodal.text == {key: theirs[key] for key in multimodal.text}
    others = ("num_key_value_heads", "head_dim", "query_pre_attn_scalar", "sliding_window")
    assert [hf.defaults[key] for key in others] == [theirs[key] for key in others]
    assert multimodal.is_tied is Gemma3Config().tie_word_embeddings


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (HEAD, "text_config: must be an object; give the config.json that transformers wrote"),
        (
            HEAD | {"text_config": {"hidden_size": "wide"}},
            'text_config.hidden_size: "wide" is not supported; an integer of at least 1 is required',
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"]},
            "architectures: architecture 'Mistral3ForConditionalGeneration' is a multimodal model that is not",
        ),
        (
            {"model_type": "llama4", "text_config": {}},
            "model_type: model type 'llama4' is a multimodal model that is not supported; supported are",
        ),
    ],
)
def test_what_cannot_be_read_is_told(values: JsonMapping, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_config_from_hf(values)
    (told,) = raised.value.faults
    assert told.startswith(fault)
    if "multimodal" in fault:
        assert "supported are Gemma3ForConditionalGeneration, and the text models GPT2LMHeadModel, Gemma2For" in told


def test_a_tensor_that_belongs_to_no_part_is_told(saved: Path, tmp_path: Path) -> None:
    folder, _ = spelled(saved, as_on_the_hub, tmp_path / "source")
    tensors = load_file(folder / ONE_FILE)
    norm = tensors["language_model.model.norm.weight"]
    save_file(tensors | {"audio_tower.a": norm + 0, "model.language_model.norm.weight": norm + 1}, folder / ONE_FILE)
    with pytest.raises(ConfigError) as raised:
        open_folder(folder, model_config_from_hf(folder))
    assert [fault.partition(":")[0] for fault in raised.value.faults] == [
        "audio_tower.a", "model.language_model.norm.weight",
    ]  # fmt: skip
