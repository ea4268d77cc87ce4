"""Folders of PEFT as first values of adapters (folders that PEFT itself wrote: tests/peers)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridtrain.errors import ConfigError
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.optim import AdamWConfig
from hybridtrain.optimizations import Lora, MixedPrecision, Nf4Weights, OptimizerOffload, WeightStreaming
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.weights.adapters import export_adapter, load_adapter
from hybridtrain.weights.exact_values import exact_values
from tiny_models import LLAMA_GROUPED, random_steps

LORA = Lora(rank=3, magnitude=True)
STACKS: dict[str, list[Optimization]] = {
    "plain": [LORA],
    "masters": [LORA, MixedPrecision()],
    "streamed-4-bits": [LORA, MixedPrecision(), Nf4Weights(), WeightStreaming()],
    "state-on-host": [LORA, OptimizerOffload()],
}
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def open_trainer(stack: list[Optimization], seed: int = 0) -> Trainer:
    settings = TrainerConfig(
        optimizer=AdamWConfig(lr=3e-2), schedule=LrSchedule(kind="constant", warmup_steps=0), seed=seed
    )
    return Trainer(LLAMA_GROUPED, compose(stack), settings, DirectTransfer(torch.device("cpu")))


def values_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: values_P.detach().reshape(-1).clone() for name, _, values_P in exact_values(trainer)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return adapters after two steps."""
    trainer = open_trainer([LORA])
    for batches in random_steps(LLAMA_GROUPED, 2):
        trainer.step(batches)
    export_adapter(trainer, tmp_path / "adapter", base="")
    return tmp_path / "adapter"


@pytest.mark.parametrize("stack", STACKS)
def test_what_was_written_comes_back_to_the_bit(stack: str, folder: Path, tmp_path: Path) -> None:
    trainer = open_trainer(STACKS[stack], seed=7)
    before = values_of(trainer)
    load_adapter(trainer, folder)
    after = values_of(trainer)
    assert not any(torch.equal(values_P, after[name]) for name, values_P in before.items())
    export_adapter(trainer, tmp_path / "again", base="")
    assert (tmp_path / "again" / FILE).read_bytes() == (folder / FILE).read_bytes()
    trainer.step(random_steps(LLAMA_GROUPED, 1)[0])
    assert trainer.steps_done == 1


def test_training_goes_on_from_the_values(folder: Path) -> None:
    first, second = open_trainer([LORA], seed=7), open_trainer([LORA])
    batches = random_steps(LLAMA_GROUPED, 2)[1]
    fresh = second.loss(batches)
    load_adapter(second, folder)
    assert second.loss(batches) < fresh
    with torch.no_grad():  # the same by hand
        tensors = load_file(folder / FILE)
        for name, parameter in first.model.named_unit_parameters():
            if name == "block.1.ffn_out.adapter.lora_b":
                parameter.copy_(tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"])
                assert torch.equal(parameter.view(-1), values_of(second)[name])


def change(**settings: object) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(content | settings))

    return work


def change_tensors(work: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / FILE)
        work(tensors)
        save_file(tensors, folder / FILE)

    return changed


def pickle_it(folder: Path) -> None:
    (folder / FILE).rename(folder / "adapter_model.bin")


NAME = "base_model.model.model.layers.2.mlp.up_proj.lora_A.weight"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "rank and alpha": (change(r=8, lora_alpha=64), "lora_alpha: 64, the plan has 32.0.*\n.*r: 8, the plan has 3; set"),
    "scaling": (change(use_rslora=True), "use_rslora: true, the plan has false; set lora's scaling"),
    "dora": (change(use_dora=False), "use_dora: false, the plan has true; set lora's magnitude"),
    "kind": (change(peft_type="IA3"), "only LoRA"),
    "ranks": (change(rank_pattern={"q_proj": 2}), "rank_pattern: .* is not supported; use"),
    "first values": (change(init_lora_weights="pissa"), 'init_lora_weights: "pissa" changes the base'),
    "missing": (change_tensors(lambda tensors: tensors.pop(NAME)), "layers.2.mlp.up_proj.lora_A.weight: missing"),
    "shape": (
        change_tensors(lambda tensors: tensors.update({NAME: torch.zeros(3, 31)})),
        r"F32 \(3, 31\) must be \(3, 32\)",
    ),
    "surplus": (
        change_tensors(lambda tensors: tensors.update({NAME.replace(".2.", ".9."): torch.zeros(3, 32)})),
        "layers.9.mlp.up_proj.lora_A.weight: not an adapter of this model",
    ),
    "targets": (
        change_tensors(lambda tensors: [tensors.pop(name) for name in [*tensors] if "q_proj" in name]),
        "the plan's of .*self_attn.q_proj.*; set lora's targets",
    ),
    "cut short": (
        lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-4]) and None,
        "not a complete safetensors file",
    ),
    "pickle": (pickle_it, "adapter_model.bin is a pickle, which can run code and is never opened"),
    "nothing": (lambda folder: (folder / FILE).unlink(), f"has no {FILE}"),
    "no config": (lambda folder: (folder / CONFIG).unlink(), f"{CONFIG}.*\n?.*does not exist"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_folder_of_another_adapter_is_one_error(kind: str, folder: Path) -> None:
    work, told = FAULTS[kind]
    work(folder)
    trainer = open_trainer([LORA], seed=7)
    before = values_of(trainer)
    with pytest.raises(ConfigError, match=told):
        load_adapter(trainer, folder)
    after = values_of(trainer)
    assert all(torch.equal(values_P, after[name]) for name, values_P in before.items())


def test_a_model_without_adapters_reads_none(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no adapters; add lora"):
        load_adapter(open_trainer([]), folder)
