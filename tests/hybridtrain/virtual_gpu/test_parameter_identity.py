"""Which parameters live on when a model is loaded and moved: as torch does it on the CPU, by every way, to the byte."""

import copy
import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig, Qwen2Config

from hybridtrain.virtual_gpu import VirtualGpu

Config = PretrainedConfig
Load = Callable[[Path, Config, str], nn.Module]
CONFIGS = {
    "qwen2, tied": Qwen2Config(
        vocab_size=1024, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "qwen2, untied": Qwen2Config(
        vocab_size=1024, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ),
    "gpt2, tied": GPT2Config(
        vocab_size=1024, n_positions=64, n_embd=128, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}  # fmt: skip


def pretrained(dtype: torch.dtype | str) -> Load:
    return lambda folder, _config, _device: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def from_config(_folder: Path, config: Config, _device: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(config)


def default_device(_folder: Path, config: Config, device: str) -> nn.Module:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def pickled(*, assign: bool) -> Load:
    def load(folder: Path, config: Config, _device: str) -> nn.Module:
        model = from_config(folder, config, "cpu")
        model.load_state_dict(torch.load(folder / "model.pt", weights_only=True), assign=assign)
        return model

    return load


def pickled_through_a_handle(folder: Path, config: Config, _device: str) -> nn.Module:
    model = from_config(folder, config, "cpu")
    with (folder / "model.pt").open("rb") as file:
        model.load_state_dict(torch.load(file, weights_only=True), assign=True)
    return model


def safetensors(*, assign: bool) -> Load:
    def load(folder: Path, config: Config, _device: str) -> nn.Module:
        model = from_config(folder, config, "cpu")
        model.load_state_dict(load_file(folder / "state.safetensors"), assign=assign)
        return model

    return load


def emptied(folder: Path, config: Config, device: str) -> nn.Module:
    with torch.device("meta"):
        model = from_config(folder, config, device)
    return model.to_empty(device=device)


def assigned_on_meta(folder: Path, config: Config, device: str) -> nn.Module:
    with torch.device("meta"):
        model = from_config(folder, config, device)
    model.load_state_dict(load_file(folder / "state.safetensors"), assign=True)
    for module in model.modules():  # what no file holds
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer)
    return model


def copied(folder: Path, config: Config, device: str) -> nn.Module:
    return copy.deepcopy(pretrained("auto")(folder, config, device))


def whole_object(folder: Path, _config: Config, device: str) -> nn.Module:
    model: nn.Module = torch.load(folder / "object.pt", weights_only=False, map_location=device)
    return model


def trained_a_little(folder: Path, config: Config, device: str) -> nn.Module:
    """Return a model with gradients: they move along."""
    model = pretrained("auto")(folder, config, device)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


LOADS: dict[str, Load] = {
    "from_config": from_config,
    "from_config under torch.device": default_device,
    "from_pretrained": pretrained("auto"),
    "from_pretrained, converted": pretrained(torch.float16),
    "load_state_dict of torch.load": pickled(assign=False),
    "load_state_dict of torch.load, assign": pickled(assign=True),
    "load_state_dict of an open file": pickled_through_a_handle,
    "load_state_dict of safetensors": safetensors(assign=False),
    "load_state_dict of safetensors, assign": safetensors(assign=True),
    "to_empty": emptied,
    "assign on meta": assigned_on_meta,
    "deepcopy": copied,
    "torch.load of a module": whole_object,
    "with gradients": trained_a_little,
}
MOVES: dict[str, Callable[[nn.Module, str], object]] = {
    "to(device)": lambda model, device: model.to(device),
    "cuda()": lambda model, device: getattr(model, device)(),
    "to(device, dtype)": lambda model, device: model.to(device, torch.bfloat16),
    "half().to(device)": lambda model, device: model.half().to(device),
    "to(device).double()": lambda model, device: model.to(device).double(),
    "there, back and there": lambda model, device: model.to(device).cpu().to(device),
    "each child": lambda model, device: [child.to(device) for child in model.children()],
    "to_empty(device)": lambda model, device: model.to_empty(device=device),
    "data of each": lambda model, device: [setattr(p, "data", p.data.to(device)) for p in model.parameters()],
}


@contextmanager
def copying_to_the_card() -> Iterator[None]:
    """Let the CPU be two devices: what is moved to "cpu" by name is copied as on its way to a card, and once."""
    true_to, true_cpu, on_card = torch.Tensor.to, torch.Tensor.cpu, dict[int, Any]()

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        names_device = (bool(args) and isinstance(args[0], str | torch.device)) or kwargs.get("device") is not None
        is_there = tensor.untyped_storage()._cdata in on_card
        made = true_to(tensor, *args, **kwargs)
        if names_device and not is_there and made.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            made = made.clone()
        if names_device or is_there:
            on_card[made.untyped_storage()._cdata] = made
        return made

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        return true_cpu(tensor).clone()

    with mock.patch.object(torch.Tensor, "to", to), mock.patch.object(torch.Tensor, "cpu", cpu):
        yield


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda name: name.replace(", ", "-"))
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    folder = tmp_path_factory.mktemp("weights")
    config = CONFIGS[request.param]
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "model.pt")
    torch.save(model, folder / "object.pt")
    save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "state.safetensors")
    return folder, config


def account(tensors: Any) -> int:
    """Return bytes of distinct storages."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def trained(build: Callable[[], nn.Module], move: Callable[[nn.Module], object], device: str, *, early: bool) -> Any:
    """Load, move and train: what is whose, and how many bytes of each kind there are."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False) if early else None
    move(model)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.arange(32, device=device).reshape(1, 32)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    state = [value for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    kinds = {
        "who is tied": sorted(groups.values()),
        "of the optimizer": sum(key in owned for key in groups),
        "types": sorted(str(parameter.dtype) for parameter in model.parameters()),
        "states": len(optimizer.state),
        "weights": account(model.parameters()),
        "gradients": account(gradients),
        "optimizer state": account(state),
    }
    buffers = [buffer for buffer in model.buffers() if buffer.device.type == device]
    everything = [*model.parameters(), *buffers, *gradients, *held, *state, ids]
    everything += [p for group in optimizer.param_groups for p in group["params"]]
    return kinds, account(t for t in everything if t.device.type == device), (model, optimizer, ids)


@pytest.mark.sample(one_in=40)
@pytest.mark.parametrize("early", [False, True], ids=["optimizer-after", "optimizer-before"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("load", LOADS)
def test_parameters_live_on_as_on_the_cpu(weights: tuple[Path, Config], load: str, move: str, early: bool) -> None:
    folder, config = weights

    def outcome(device: str) -> Any:
        try:
            return trained(
                lambda: LOADS[load](folder, config, device), lambda model: MOVES[move](model, device), device,
                early=early,
            )  # fmt: skip
        except (NotImplementedError, RuntimeError) as error:
            return str(error).split("!")[0], 0, None

    with copying_to_the_card():
        expected, _, _ = outcome("cpu")
    with VirtualGpu("rtx-4090") as gpu:
        found, owned, _kept = outcome("cuda")
        gc.collect()
        workspaces = len(gpu.ledger.first_matmuls) * gpu.card.cublas_workspace_bytes
        assert found == expected
        requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
        assert not owned or requested == owned + workspaces


@pytest.mark.parametrize("move", MOVES)
def test_a_model_made_before_the_card_keeps_its_parameters(move: str) -> None:
    config = CONFIGS["qwen2, tied"]
    made = [AutoModelForCausalLM.from_config(config) for _ in range(2)]
    with copying_to_the_card():
        expected, _, _ = trained(lambda: made[0], lambda model: MOVES[move](model, "cpu"), "cpu", early=True)
    with VirtualGpu("rtx-4090"):
        found, _, _ = trained(lambda: made[1], lambda model: MOVES[move](model, "cuda"), "cuda", early=True)
    assert found == expected


def test_a_moved_parameter_keeps_hooks_attributes_and_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2**19))
    parameter.mark = "kept"  # type: ignore[attr-defined]
    parameter.grad = gradient = torch.ones(2**19)
    with VirtualGpu("rtx-4090"):
        parameter.data = parameter.data.to("cuda", torch.float16)
        assert (parameter.mark, parameter.grad is gradient, gradient.device.type) == ("kept", True, "cuda")  # type: ignore[attr-defined]
        assert gradient.dtype is torch.float16
        (parameter * 2).sum().backward()
        assert torch.cuda.memory_allocated() == 2 * 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("work", ["converted", "stacked", "halved in place of files"])
def test_work_on_the_host_is_counted_and_takes_no_memory(work: str, tmp_path: Path) -> None:
    num_tensors, size = 24, 2**24  # 64 MiB each as float32, 1.5 GiB together
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(num_tensors * size * 2)
    made: list[torch.Tensor] = []
    with VirtualGpu("rtx-4090") as gpu:
        storage = torch.UntypedStorage.from_file(str(tmp_path / "holes"), False, num_tensors * size * 2)
        stored = torch.tensor([], dtype=torch.bfloat16).set_(storage)
        before = resident_bytes()
        for part in stored.chunk(num_tensors):
            if work == "converted":
                made.append(part.float())
            elif work == "stacked":
                made.append(torch.stack([part, part]))
            else:
                made += [part.half(), part * 2]
        assert gpu.host_peak_bytes >= sum(tensor.nbytes for tensor in made) == num_tensors * size * 4
        moved = made[-1].to("cuda")
        assert torch.cuda.memory_allocated() == moved.nbytes
    taken = resident_bytes() - before
    assert taken < 0.5 * num_tensors * size * 4, "no more than the little that is computed for real, and its source"
    del made, moved


@pytest.mark.parametrize("way", ["by hand", "backward pass on the host"])
def test_weights_of_a_file_get_gradients_while_they_are_on_the_host(way: str, tmp_path: Path) -> None:
    size = 2**19
    torch.save([torch.zeros(size // 4, 4) for _ in range(4)], tmp_path / "weights.pt")
    with VirtualGpu("rtx-4090") as gpu:
        gpu.ledger.most_real_bytes = 2**21  # one result, of 2 MiB
        layers = [nn.Linear(4, 1) for _ in range(4)]
        for layer, weight in zip(layers, torch.load(tmp_path / "weights.pt"), strict=True):
            layer.weight = nn.Parameter(weight)
        model = nn.ModuleList(layers)
        kept = list(model.parameters())
        if way == "by hand":
            for parameter in kept:
                parameter.grad = torch.ones_like(parameter)
        else:
            model.forward = lambda x: sum(layer.weight.matmul(x).sum() for layer in layers)
            model(torch.randn(4)).backward()
        torch.optim.SGD([layer.weight for layer in layers], lr=0.1, momentum=0.9).step()
        assert [*map(id, model.parameters())] == [*map(id, kept)]
        assert all(layer.weight.grad is not None and layer.weight.grad.device.type == "cpu" for layer in layers)
        assert torch.cuda.memory_allocated() == 0
        model.cuda()
        assert torch.cuda.memory_allocated() >= 2 * 4 * 4 * size, "weights and gradients"


def test_what_a_script_prepares_keeps_its_values() -> None:
    numbers = np.arange(2**21, dtype=np.int32)
    with VirtualGpu("rtx-4090") as gpu:
        halves = torch.from_numpy(numbers).float() / 2
        assert halves[-1].item() == 2**20 - 0.5
        assert gpu.host_peak_bytes == 2 * 2**23
        del halves
        assert gpu.ledger.host_bytes == 0
    assert not gpu.placeholders()
