"""Weights that take no disk: what from_pretrained makes of them, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from faults.runs import ended, fork_now
from hybridtrain.cli.main import main
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import PRESETS
from hybridtrain.virtual_gpu import VirtualGpu
from hybridtrain.weights.dummy_weights import write_dummy_model, write_dummy_weights

LLAMA = LlamaConfig(
    architectures=["LlamaForCausalLM"], vocab_size=2**15, hidden_size=2048, intermediate_size=4096,
    num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4, dtype="bfloat16",
)  # fmt: skip
EXPERTS = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"], vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, moe_intermediate_size=32,
    dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=["llama", "experts"])
def test_a_script_loads_the_model_and_no_byte_of_it_is_on_disk(tmp_path: Path, config: PreTrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_bytes()
    files, dtype = write_dummy_weights(tmp_path)
    assert dtype is torch.bfloat16
    assert (tmp_path / "config.json").read_bytes() == text
    with VirtualGpu("rtx-4090"):
        model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
        assert not loaded["missing_keys"]
        assert not loaded["unexpected_keys"]
        size = sum(parameter.numel() * 2 for parameter in model.parameters())
        assert model.dtype is torch.bfloat16
        model.to("cuda")
        assert torch.cuda.memory_allocated() >= size
    assert size < sum(file.stat().st_size for file in files) < size + 2**15
    assert sum(file.stat().st_blocks * 512 for file in files) < 2**16


def test_a_new_folder_named_as_a_preset_gets_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "qwen2.5-0.5b"
    files, dtype = write_dummy_model(folder)
    assert dtype is torch.bfloat16
    assert all(file.is_file() for file in files)
    with VirtualGpu("rtx-4090"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert sum(parameter.numel() for parameter in model.parameters()) == PRESETS["qwen2.5-0.5b"].num_params
    with pytest.raises(ConfigError, match="already; choose a folder"):
        write_dummy_model(folder)
    with pytest.raises(ConfigError, match="no such file"):
        write_dummy_model(tmp_path / "no-preset")


@pytest.mark.parametrize(("named", "dtype"), [(None, torch.float32), ("float16", torch.float16)])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_weights_have_the_type_that_transformers_gives_them(
    tmp_path: Path, named: str | None, dtype: torch.dtype, key: str
) -> None:
    settings = {name: value for name, value in LLAMA.to_dict().items() if name not in {"dtype", "torch_dtype"}}
    (tmp_path / "config.json").write_text(json.dumps(settings | ({} if named is None else {key: named})))
    files, found = write_dummy_weights(tmp_path)
    assert found is dtype
    with VirtualGpu("rtx-4090"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert model.dtype is dtype
        size = sum(parameter.nbytes for parameter in model.parameters())
    assert size < sum(file.stat().st_size for file in files) < size + 2**15


def test_weights_that_are_there_are_left_alone(tmp_path: Path) -> None:
    LLAMA.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"values")
    with pytest.raises(ConfigError, match=r"has pytorch_model.bin already; choose a folder without weights"):
        write_dummy_weights(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"architectures": ["Lama"]}, "architectures: .*Lama.* is not a class of transformers; correct it."),
        ({"architectures": None}, "architectures: None is not a class of transformers"),
        ({"model_type": "lama"}, "config.json: .*lama"),
    ],
)
def test_a_configuration_that_names_no_model_is_refused(tmp_path: Path, change: dict[str, object], fault: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict() | change, default=str))
    with pytest.raises(ConfigError, match=fault):
        write_dummy_weights(tmp_path)


def test_no_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; put the model's config\.json there"):
        write_dummy_weights(tmp_path)


WIDENS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).to("cuda")
assert torch.cuda.memory_allocated() >= 4 * sum(p.numel() for p in model.parameters())
"""


def resident_bytes(kind: str) -> int:
    return 1024 * int(re.findall(rf"Vm{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def test_weights_that_are_widened_on_the_host_take_no_memory(tmp_path: Path) -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    write_dummy_weights(tmp_path)
    script = tmp_path / "widens.py"
    script.write_text(WIDENS)

    def load() -> None:
        before = resident_bytes("RSS")
        assert main(["virtual", "--card", "h200", "--", str(script), str(tmp_path)]) == 0
        (tmp_path / "taken").write_text(str(resident_bytes("HWM") - before))

    assert ended(fork_now(load)) == 0  # whose high-water mark is its own
    assert int((tmp_path / "taken").read_text()) < 2**30, "1 GiB, of 7.2 GiB of weights"
