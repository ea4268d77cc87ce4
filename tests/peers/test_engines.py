"""Trainers of others at tiny size: planned on a virtual card, trained on the CPU; what is not installed is skipped."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest

from hybridtrain.models.model_config import BatchWorkload, ModelConfig
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridvalidation.engines.task import Task
from hybridvalidation.experiments import peer_runs as peer_run

pytestmark = pytest.mark.filterwarnings("default")  # of others' packages
LLAMA = ModelConfig(
    family="llama", vocab_size=512, max_seq_len=64, num_blocks=2, width=128, num_heads=4, num_kv_heads=2, ffn_width=256
)
GPT2 = ModelConfig(
    family="gpt2", vocab_size=512, max_seq_len=64, num_blocks=2, width=128, num_heads=4, num_kv_heads=4, ffn_width=512,
    tied=True,
)  # fmt: skip
GALORE = '"optim_target_modules": ["attn", "mlp"], "optim_args": "rank=16, update_proj_gap=200, scale=0.25"'
LORA = '"adapter": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}'
DORA = LORA.replace('"r"', '"use_dora": true, "r"')
NF4 = '"quantize": {"load_in_4bit": true, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true}'
TRAINER = '"trainer": {"optim": "adamw_torch", "gradient_checkpointing": true}'
LIT_LORA = '"lora": {"lora_r": 8, "lora_alpha": 16, "lora_query": true, "lora_key": true, "lora_value": true}'
PAGED = "bitsandbytes.optim.PagedAdamW8bit"
CASES = {
    "torchao-8bit": ("torch", '{"optimizer": "torchao.optim.AdamW8bit"}', ("torchao",)),
    "torchao-4bit": ("torch", '{"optimizer": "torchao.optim.AdamW4bit"}', ("torchao",)),
    "paged": ("torch", f'{{"optimizer": "{PAGED}", "update_in_backward": true}}', ("bitsandbytes",)),
    "trainer": ("transformers", '{"optim": "adamw_torch", "gradient_checkpointing": true}', ("accelerate",)),
    "trainer-8bit": ("transformers", '{"optim": "adamw_bnb_8bit"}', ("accelerate", "bitsandbytes")),
    "trainer-adafactor": ("transformers", '{"optim": "adafactor"}', ("accelerate",)),
    "trainer-galore": ("transformers", f'{{"optim": "galore_adamw", {GALORE}}}', ("accelerate", "galore_torch")),
    "trainer-lomo": ("transformers", '{"optim": "lomo"}', ("accelerate", "lomo_optim")),
    "sft": ("trl", '{"optim": "adamw_torch"}', ("trl",)),
    "sft-lora": ("trl", '{"adapter": {"r": 8, "target_modules": "all-linear"}}', ("trl", "peft")),
    "lora": ("peft", f"{{{LORA}, {TRAINER}}}", ("peft", "accelerate")),
    "dora": ("peft", f"{{{DORA}, {TRAINER}}}", ("peft", "accelerate")),
    "qlora": ("peft", f"{{{NF4}, {LORA}, {TRAINER}}}", ("peft", "accelerate", "bitsandbytes")),
    "litgpt": ("litgpt", "{}", ("litgpt",)),
    "litgpt-lora": ("litgpt", f"{{{LIT_LORA}}}", ("litgpt",)),
}


def task(case: str, **changes: object) -> Task:
    engine, config, needs = CASES[case]
    for name in needs:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    found = Task(engine=engine, model=LLAMA, workload=BatchWorkload(batch_size=4, seq_len=32), config=config)
    return replace(found, **changes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run torchao's updates eagerly, and let accelerate look for a device anew."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    yield
    if find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState  # noqa: PLC0415

        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("case", CASES)
def test_it_is_planned(case: str) -> None:
    found = peer_run.plan(task(case), find_card("rtx-3090"), Host())
    assert (found.fits, found.shortage, found.without_gradient) == (True, "", 0)
    assert 0 < found.peak_allocated_bytes <= found.peak_reserved_bytes
    assert found.step_time_s > 0
    if not any(word in case for word in ("lora", "dora")):
        assert found.num_params == LLAMA.num_params


@pytest.mark.parametrize("case", CASES)
def test_it_trains(case: str) -> None:
    assert len(peer_run.execute(task(case).small()).losses) == 5


@pytest.mark.parametrize("case", ["trainer", "sft"])
def test_micro_batches_take_less(case: str) -> None:
    card, host = find_card("rtx-3090"), Host()
    tokens = BatchWorkload(batch_size=16, seq_len=64)
    whole, cut = (
        peer_run.plan(
            task(case, workload=tokens, micro_batches=count, precision="mixed"), card, host
        ).peak_allocated_bytes
        for count in (1, 8)
    )
    assert cut < whole


def test_gpt2_has_as_many_parameters_as_ours() -> None:
    found = peer_run.plan(task("trainer", model=GPT2, precision="mixed"), find_card("rtx-3090"), Host())
    assert found.num_params == GPT2.num_params


def test_adapters_and_four_bits_take_less_than_all_weights() -> None:
    card, host = find_card("rtx-3090"), Host()
    wide = replace(LLAMA, width=512, num_heads=8, num_kv_heads=8, ffn_width=2048)
    full, lora, qlora = (
        peer_run.plan(task(case, model=wide), card, host).peak_allocated_bytes for case in ("trainer", "lora", "qlora")
    )
    assert qlora < lora < full


def test_four_bits_are_planned_twice_in_a_process() -> None:
    # bitsandbytes keeps its tables; a recipe that is refused runs again on a larger card.
    first, second = (peer_run.plan(task("qlora"), find_card("rtx-3090"), Host()) for _ in range(2))
    assert first.fits
    assert first == second


def test_every_config_is_json() -> None:
    assert all(isinstance(json.loads(config), dict) for _, config, _ in CASES.values())
