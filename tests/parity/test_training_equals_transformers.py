"""Step by step the loss and the gradient norm of every family are those of transformers, and of PEFT around it.

Rows with padding and rows of several documents, with the experts' load-balancing loss, on one rank and on two.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from hf_folders import FAMILY_MODELS, load_model, save_model, transformers_model
from hf_training import ACCUMULATED, ADAMW, Told, rows_of, train_with_transformers
from hybridtrain.memory.group import Group
from hybridtrain.memory.transfer import DirectTransfer
from hybridtrain.models.adapter import adapter_coverage
from hybridtrain.models.families import FAMILIES
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.optimizations import ChunkedLoss, GradAccumulation, GradientCheckpointing, Lora
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.trainer import Trainer
from hybridtrain.trainer_config import LrSchedule, TrainerConfig
from hybridtrain.weights.adapters import export_adapter
from hybridtrain.weights.hf_source import open_folder
from ranks import on_ranks
from tiny_models import FAMILIES as FAMILIES_BESIDE_GPT2

CPU = torch.device("cpu")
NATS, NORM = 2e-6, 1e-5
"""Loss in nats and norm relative to itself: float32 sums in another order.

Losses of 4 to 8 nats lie 4.8e-7 apart in float32: four of those, of which one processor needs two and another three.
"""


def _balanced(config: ModelConfig) -> ModelConfig:
    """Return a model whose experts have a load-balancing loss that moves the norm."""
    experts = config.experts
    return config if experts is None else replace(config, experts=replace(experts, balance_coefficient=0.3))


MODELS = {name: _balanced(FAMILY_MODELS[name]) for name in ("gpt2-odd-tied", *FAMILIES_BESIDE_GPT2)}
STACKS: dict[str, list[Optimization]] = {
    "all": [GradientCheckpointing(recompute_every=2)],
    "lora": [Lora(rank=3, alpha=5.0)],
    "dora": [Lora(rank=3, magnitude=True), ChunkedLoss(loss_chunk_tokens=5)],
}
PACKINGS = {"all": ("none", "documents"), "lora": ("none",), "dora": ("documents",)}
CASES = [(name, stack, packing) for name in MODELS for stack in STACKS for packing in PACKINGS[stack]]
RANK_CASES = [case for case in CASES if case[1:] in {("all", "documents"), ("lora", "none")}]
"""Two of each family, one of which is enough where ranks have no experts to balance."""
Case = tuple[str, str, str]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence transformers' log."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        model = transformers_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)  # of sharper ones a rounding error moves Gemma 3's norm by 1e-5
        save_model(model, found / name)
    return found


def ours(folder: Path, case: Case, group: Group | None = None) -> Trainer:
    name, stack, _ = case
    config = TrainerConfig(optimizer=ADAMW, schedule=LrSchedule(kind="constant", warmup_steps=0))
    plan = compose([*STACKS[stack], GradAccumulation(grad_accum_steps=ACCUMULATED)])
    source = open_folder(folder / name, MODELS[name])
    return Trainer(MODELS[name], plan, config, DirectTransfer(CPU), source=source, group=group)


def train(trainer: Trainer, case: Case) -> Told:
    count = ACCUMULATED // trainer.group.world
    first = trainer.group.rank * count
    steps = rows_of(MODELS[case[0]], packing=case[2])
    told = [trainer.step(batches[first : first + count]) for batches in steps]
    return [(step.loss, step.grad_norm or 0.0) for step in told]


@cache
def theirs(folder: Path, case: Case) -> Told:
    name, stack, packing = case
    model = load_model(folder / name, MODELS[name])
    if stack != "all":
        place = folder / "-".join(case)
        export_adapter(ours(folder, case), place, base="")
        model = PeftModel.from_pretrained(model, place, is_trainable=True)
    return train_with_transformers(model.train(), rows_of(MODELS[name], packing=packing))


def differences(found: Told, expected: Told) -> tuple[float, float]:
    """Return the largest difference of the loss in nats, and of the norm relative to what is expected."""
    pairs = list(zip(found, expected, strict=True))
    return max(abs(a[0] - b[0]) for a, b in pairs), max(abs(a[1] / b[1] - 1) for a, b in pairs)


def test_every_family_is_compared() -> None:
    assert {config.family for config in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_step_is_that_of_transformers(case: Case, folder: Path) -> None:
    loss, norm = differences(train(ours(folder, case), case), theirs(folder, case))
    assert loss <= NATS
    assert norm <= NORM


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set", "ignore:The following (rank|alpha)_pattern")
@pytest.mark.parametrize("name", MODELS)
def test_all_linear_is_that_of_peft_but_for_experts(name: str, folder: Path, tmp_path: Path) -> None:
    trainer = ours(folder, (name, "lora", "none"))
    export_adapter(trainer, tmp_path / "adapter", base="")
    found = {key.partition(".lora_")[0] for key in load_file(tmp_path / "adapter/adapter_model.safetensors")}
    settings = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(load_model(folder / name, MODELS[name]), settings)
    expected = {key.partition(".lora_")[0] for key, values in theirs.named_parameters() if values.requires_grad}
    experts = {key for key in expected if trainer.model.config.experts and ".mlp." in key}
    assert found == expected - experts
    covered, others = adapter_coverage(trainer.model)
    assert len(covered) * trainer.model.config.num_blocks == len(found)
    assert others == (["router", "experts_gate", "experts_up", "experts_out"] if trainer.model.config.experts else [])


def test_every_step_of_two_ranks_is_that_of_transformers(folder: Path, pytestconfig: pytest.Config) -> None:
    every_case = pytestconfig.getoption("every_case")
    cases = [
        case for number, case in enumerate(RANK_CASES)
        if every_case or MODELS[case[0]].experts is not None or number % 4 in {0, 3}
    ]  # fmt: skip

    def work(group: Group) -> dict[Case, Told]:
        return {case: train(ours(folder, case, group), case) for case in cases}

    for found in on_ranks(2, work):
        apart = {case: differences(told, theirs(folder, case)) for case, told in found.items()}
        assert {case: pair for case, pair in apart.items() if pair[0] > NATS or pair[1] > NORM} == {}


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if config.experts])
def test_padding_and_the_load_balancing_loss_move_the_norm(name: str, packing: str, folder: Path) -> None:
    """Otherwise the cases above would not see either."""
    case = (name, "all", packing)
    trainer = ours(folder, case)
    (batches, *_) = rows_of(MODELS[name], packing=packing)
    norm = trainer.step(batches).grad_norm
    full = [replace(batch, lengths_B=None) for batch in batches]
    assert ours(folder, case).step(full).grad_norm != pytest.approx(norm, rel=1e-3)
    trainer = ours(folder, case)
    trainer.executor.balanced = None
    assert trainer.step(batches).grad_norm != pytest.approx(norm, rel=1e-3)
