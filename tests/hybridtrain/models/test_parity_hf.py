"""Every family against transformers with the same weights: logits, loss and every gradient."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from hf_folders import transformers_model
from hybridtrain.data.batches import document_positions
from hybridtrain.errors import ConfigError
from hybridtrain.models.block_model import BlockModel, Documents
from hybridtrain.models.build import build_model
from hybridtrain.models.families import FAMILIES
from hybridtrain.models.model_config import ModelConfig
from hybridtrain.weights.disk_names import disk_weight
from hybridtrain.weights.hf_source import ONE_FILE, open_folder
from tiny_models import FAMILIES as TINY
from tiny_models import GPT2_ODD, GPT2_UNTIED, LLAMA_GROUPED, LLAMA_ODD, random_batch

MODELS = {
    "gpt2-untied": GPT2_UNTIED,
    "gpt2-odd-tied": GPT2_ODD,
    "llama-grouped": LLAMA_GROUPED,
    "llama-odd": LLAMA_ODD,
    "llama-tied": replace(LLAMA_GROUPED, tied=True),
    "llama-other-theta": replace(LLAMA_GROUPED, rope_theta=500.0),
    **TINY,
}
CPU = torch.device("cpu")


@dataclass
class Result:
    """Logits, loss and gradients by our parameter names, in our layout."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence transformers' log."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def as_on_disk(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of transformers by the names of its checkpoints: it stacks experts in memory."""
    is_mixtral = config.family == "mixtral"
    ours = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    parts = ours if is_mixtral else {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    found = {}
    for key, tensor in state.items():
        name = key.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else key
        folder, _, last = name.rpartition(".")
        if not folder.endswith(".experts"):
            found[name] = tensor
            continue
        for part, stack in zip(parts[last], tensor.chunk(len(parts[last]), dim=1), strict=True):
            found |= {f"{folder}.{expert}.{part}.weight": one for expert, one in enumerate(stack)}
    return found


def our_model(config: ModelConfig, source: nn.Module, dtype: torch.dtype = torch.float32) -> BlockModel:
    model = build_model(config, dtype, CPU)
    with TemporaryDirectory() as folder, torch.no_grad():
        weights = open_folder(save(as_on_disk(config, source.state_dict()), Path(folder)), config)
        for name, parameter in model.named_unit_parameters():
            parameter.copy_(weights.read(name, slice(0, parameter.numel())).view(parameter.shape))
    return model


def save(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / ONE_FILE)
    return folder


def run_transformers(model: nn.Module, ours: BlockModel, token_ids_BT: Tensor, target_ids_BT: Tensor) -> Result:
    logits = model(token_ids_BT).logits
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), target_ids_BT.flatten())
    loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = as_on_disk(ours.config, named)
    grads = {}
    for name, _ in ours.named_unit_parameters():
        weight = disk_weight(ours.config, name)
        pieces = [found[theirs].t() if weight.is_transposed else found[theirs] for theirs in weight.names]
        grads[name] = torch.stack(pieces) if len(pieces) > 1 else pieces[0]
    return Result(logits.detach(), loss.detach(), grads)


def run_ours(model: BlockModel, token_ids_BT: Tensor, target_ids_BT: Tensor) -> Result:
    hidden_BTD = model(token_ids_BT)
    loss = model.head(hidden_BTD, target_ids_BT)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_unit_parameters()}
    return Result(model.head.logits(hidden_BTD).detach(), loss.detach(), grads)


def tokens(config: ModelConfig) -> tuple[Tensor, Tensor]:
    batch = random_batch(config, np.random.default_rng(0))
    return torch.from_numpy(batch.token_ids_BT), torch.from_numpy(batch.target_ids_BT)


def distance(actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """Return the 2-norm of the difference over that of what is expected."""
    norm = (expected if scale is None else scale).double().norm()
    return ((actual.double() - expected.double()).norm() / norm).item()


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    config = MODELS[name]
    source = transformers_model(config)
    ours = our_model(config, source)
    actual = run_ours(ours, *tokens(config))
    expected = run_transformers(source, ours, *tokens(config))
    assert distance(actual.loss, expected.loss) < 1e-6
    assert distance(actual.logits, expected.logits) < 1e-5
    for parameter, grad in actual.grads.items():
        # A key's bias moves all scores of a query nearly alike, which the softmax does not see: its gradient is what is
        # left of sums as large as the query's.
        scale = expected.grads[parameter.replace("key.bias", "query.bias")]
        assert distance(grad, expected.grads[parameter], scale) < 1e-5, parameter
        assert scale.abs().max() > 1e-4, f"{parameter}: too small to compare"


def test_every_family_is_compared() -> None:
    assert {config.family for config in MODELS.values()} == set(FAMILIES)


BF16 = {name: MODELS[name] for name in ("gpt2-odd-tied", "llama-odd", *TINY)}


@pytest.mark.parametrize("name", BF16)
def test_bfloat16_is_no_worse_than_twice_transformers_own(name: str) -> None:
    config = BF16[name]
    source = transformers_model(config).bfloat16()
    ours = our_model(config, source, torch.bfloat16)
    actual, theirs = run_ours(ours, *tokens(config)), run_transformers(source, ours, *tokens(config))
    source.zero_grad()
    exact = run_transformers(source.float(), ours, *tokens(config))

    def error(result: Result) -> tuple[float, float]:
        grads, true = (torch.cat([grad.flatten() for grad in one.grads.values()]) for one in (result, exact))
        return distance(result.logits, exact.logits), distance(grads, true)

    for own, allowed in zip(error(actual), error(theirs), strict=True):
        assert own <= 2 * allowed


@pytest.mark.parametrize("name", BF16)
def test_packed_documents_are_rows_of_their_own(name: str) -> None:
    config = BF16[name]
    model = our_model(config, transformers_model(config))
    ids_BT = torch.tensor([[0] * 7 + [1] * 10], dtype=torch.int32)
    documents = Documents(ids_BT, torch.from_numpy(document_positions(ids_BT.numpy())))
    token_ids_BT = tokens(config)[0][:1]
    packed_BTD = model(token_ids_BT, documents)
    alone = [model(token_ids_BT[:, :7]), model(token_ids_BT[:, 7:])]
    assert distance(packed_BTD, torch.cat(alone, dim=1)) < 1e-5
    assert distance(model(token_ids_BT), packed_BTD) > 1e-2  # a row of one document is another thing


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_transformers_has_one_of_ours(name: str) -> None:
    config = MODELS[name]
    source = transformers_model(config)
    ours = build_model(config, torch.float32, torch.device("meta"))
    names = [theirs for name_, _ in ours.named_unit_parameters() for theirs in disk_weight(config, name_).names]
    assert sorted(names) == sorted(as_on_disk(config, dict(source.named_parameters())))


def test_missing_and_misshapen_weights_are_all_listed(tmp_path: Path) -> None:
    state = dict(transformers_model(GPT2_ODD).state_dict())
    del state["transformer.h.1.ln_2.bias"]
    state["transformer.wpe.weight"] = torch.zeros(16, 36)
    state["transformer.h.0.attn.c_attn.weight"] = torch.zeros(108, 36)
    with pytest.raises(ConfigError) as raised:
        open_folder(save(state, tmp_path), GPT2_ODD)
    assert raised.value.faults == (
        "transformer.wpe.weight: (16, 36) must be (17, 36); use the config.json of these weights",
        "transformer.h.0.attn.c_attn.weight: (108, 36) must be (36, 108); use the config.json of these weights",
        "transformer.h.1.ln_2.bias: missing; shape (36,) is required: download the folder again",
    )
    assert str(raised.value).startswith(f"{tmp_path}: 3 faults")
