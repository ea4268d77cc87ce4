"""Checkpoints under a virtual card: written without values, read again, never over a file that holds some."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from faults.runs import ended, fork_now
from hybridtrain.units import GIB
from hybridtrain.virtual_gpu import VirtualGpu

WIDE = 2**14


def test_a_checkpoint_returns_to_its_places_and_keeps_what_was_known(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    with VirtualGpu("h100-sxm") as gpu:
        model = nn.Linear(WIDE, WIDE, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(3):
            model(torch.ones(1, WIDE, device="cuda")).sum().backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "at": torch.device("cuda", 0)}
        torch.save(state, file)
        del state
        before = torch.cuda.memory_allocated()
        loaded = torch.load(file, weights_only=False)
        assert loaded["model"]["weight"].device == torch.device("cuda", 0) == loaded["at"]
        assert torch.cuda.memory_allocated() - before == 3 * 4 * (WIDE**2 + WIDE)  # weights and two moments
        assert loaded["optimizer"]["state"][0]["step"].item() == 3
        del loaded
        on_host = torch.load(file, map_location="cpu")["model"]
        assert torch.cuda.memory_allocated() == before
        assert on_host["weight"].device.type == "cpu"
        model.load_state_dict(on_host)
    assert gpu.host_peak_bytes >= 4 * WIDE**2
    assert file.stat().st_size < 2**16


def test_a_file_without_values_says_so_where_no_virtual_card_is(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    with VirtualGpu("rtx-4090"):
        torch.save(torch.empty(8, 8, device="cuda"), file)
    with pytest.raises(RuntimeError, match="holds shapes without values"):
        torch.load(file, weights_only=False)


def test_a_real_checkpoint_goes_where_it_is_told(tmp_path: Path) -> None:
    file = tmp_path / "real.pt"
    torch.save({"weight": torch.arange(6.0)}, file)
    with VirtualGpu("rtx-4090"):
        on_card = torch.load(file, map_location="cuda")["weight"]
        assert on_card.is_cuda
        assert on_card.tolist() == torch.arange(6.0).tolist()
        assert torch.load(file)["weight"].device.type == "cpu"


@pytest.mark.parametrize("module", [torch, safetensors.torch])
def test_a_file_with_values_is_not_replaced(tmp_path: Path, module: ModuleType) -> None:
    name = "save" if module is torch else "save_file"
    file = tmp_path / "weights"
    getattr(module, name)({"weight": torch.ones(4)}, file)
    before = file.read_bytes()
    with VirtualGpu("rtx-4090"), pytest.warns(UserWarning, match="holds values: the virtual card keeps it"):
        getattr(module, name)({"weight": torch.empty(4, device="cuda")}, file)
    assert file.read_bytes() == before


def test_safetensors_have_their_header_and_length_and_take_no_disk(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with VirtualGpu("h100-sxm"):
        weight = torch.empty(4, GIB // 4, dtype=torch.bfloat16, device="cuda")
        for _ in range(2):  # its own file it may replace
            save_file({"weight": weight, "count": torch.empty(3, dtype=torch.int64, device="cuda")}, file)
        loaded = load_file(file)
        assert loaded["weight"].shape == weight.shape
        assert loaded["weight"].dtype is torch.bfloat16
        assert loaded["weight"].to("cuda").is_cuda
    assert file.stat().st_size > 2 * GIB
    assert file.stat().st_blocks * 512 < 2**16
    save_file({"weight": torch.ones(2)}, tmp_path / "real")  # as it was before
    assert load_file(tmp_path / "real")["weight"].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_and_save_pretrained_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "real")
    with VirtualGpu("rtx-4090"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "real", dtype=dtype).to("cuda")
        size = dtype.itemsize * sum(parameter.numel() for parameter in model.parameters())
        # Each of 20 tensors is rounded up to 512 bytes; positions' frequencies are a buffer.
        assert size <= torch.cuda.memory_allocated() <= size + 512 * 22
        assert len({parameter.data_ptr() for parameter in model.parameters()}) == len(list(model.parameters()))
        model.save_pretrained(tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
        assert {k: v.shape for k, v in again.state_dict().items()} == {
            k: v.shape for k, v in model.state_dict().items()
        }
    assert load_file(tmp_path / "real" / "model.safetensors")["model.norm.weight"].tolist() == [1] * 64


def test_a_library_may_be_imported_inside(tmp_path: Path) -> None:
    file = tmp_path / "late.safetensors"

    def save() -> None:
        for name in [name for name in sys.modules if name.startswith("safetensors")]:
            del sys.modules[name]  # of this process, a forked one
        with VirtualGpu("rtx-4090"):
            from safetensors.torch import save_file as saves_late  # noqa: PLC0415  that is what is tried

            assert saves_late.__globals__ is not vars(safetensors.torch)
            saves_late({"weight": torch.empty(2**20, device="cuda")}, file)

    assert ended(fork_now(save)) == 0
    with safetensors.safe_open(file, framework="pt") as saved:
        assert "hybridtrain_virtual" in saved.metadata()
        assert saved.get_slice("weight").get_shape() == [2**20]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_safetensors_open_on_a_card(tmp_path: Path, device: str | int) -> None:
    save_file({"weight": torch.ones(64, 64)}, tmp_path / "a.safetensors")
    with VirtualGpu("rtx-4090"):
        assert load_file(tmp_path / "a.safetensors", device=device)["weight"].is_cuda
        with safetensors.safe_open(tmp_path / "a.safetensors", "pt", device=device) as file:
            assert file.get_tensor("weight").is_cuda
        assert torch.cuda.max_memory_allocated() >= 64 * 64 * 4
