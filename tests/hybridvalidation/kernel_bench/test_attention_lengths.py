"""What attention holds, planned: against sums by hand, and against the same functions with real arithmetic."""

import json
from pathlib import Path

import pytest
import torch

from hybridkernels.flash_attention import backward_workspace_bytes
from hybridtrain.models.layers import ATTENTION
from hybridtrain.models.model_config import PRESETS
from hybridtrain.plan.memory_plan import Attention
from hybridtrain.reports.tables import MARKDOWN
from hybridtrain.stacks import default_folder
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.cards.card import card_catalogue
from hybridvalidation.judge.verdict import Status
from hybridvalidation.kernel_bench import attention_lengths
from hybridvalidation.kernel_bench.attention_lengths import (
    SAVING,
    AttentionRecord,
    append_attention,
    attention_cost,
    attention_text,
    judge_attention,
    plan_attention,
    read_attention,
    write_attention,
)
from hybridvalidation.scenario import Target
from hybridvalidation.scenario_files import ScenarioFiles

CARD = card_catalogue()["rtx-4090"]
TARGETS = ScenarioFiles(default_folder()).targets()


@pytest.fixture(scope="module")
def record() -> AttentionRecord:
    return plan_attention({})


@pytest.mark.parametrize("seq_len", [128, 1024])
def test_the_flash_kernel_keeps_one_number_a_row_and_works_in_its_scratch(seq_len: int) -> None:
    config = PRESETS["gpt2-small"]
    cost = attention_cost("gpt2-small", Attention.FLASH, seq_len, CARD)
    assert cost.kept_bytes == 4 * config.num_heads * seq_len
    q = torch.empty(1, seq_len, config.num_heads, config.head_dim, dtype=torch.bfloat16, device="meta")
    assert cost.peak_bytes == cost.kept_bytes + backward_workspace_bytes(q, q)


def test_unfused_attention_keeps_scores_of_all_pairs() -> None:
    config = PRESETS["gpt2-small"]
    pairs = config.num_heads * 512 * 512
    cost = attention_cost("gpt2-small", Attention.UNFUSED, 512, CARD)
    # float32 softmax for its own gradient, its rounded copy for the product with v
    assert cost.kept_bytes == (4 + 2) * pairs
    assert cost.peak_bytes >= (4 + 2 + 2) * pairs


@pytest.mark.parametrize("attention", list(Attention))
def test_the_plan_counts_what_real_arithmetic_holds(attention: Attention) -> None:
    planned = attention_cost("gpt2-small", attention, 64, CARD)
    ledger = StorageLedger()
    with ledger:
        inputs = [torch.zeros(1, 64, 12, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        grad = torch.ones(1, 64, 12, 64, dtype=torch.bfloat16)
        before = ledger.live_bytes
        out = ATTENTION[attention](*inputs)
        assert ledger.live_bytes - before - out.nbytes == planned.kept_bytes
        grads = torch.autograd.grad(out, inputs, grad)
    peak = ledger.peak_bytes - before
    assert planned.peak_bytes <= peak <= planned.peak_bytes + out.nbytes + sum(g.nbytes for g in grads)


def test_the_saving_grows_with_the_length_and_its_border_is_exact(record: AttentionRecord) -> None:
    for model in {point.model for point in record.points}:
        points = [point for point in record.points if point.model == model]
        savings = [point.saving_pct for point in points]
        assert savings == sorted(savings)
        border = next(point.seq_len for point in points if point.saving_pct >= 99.0)
        shorter = [attention_cost(model, kind, border - 64, CARD).peak_bytes for kind in Attention]
        assert 100 * (1 - shorter[0] / shorter[1]) < 99.0


def test_a_saving_that_no_length_reaches_has_no_border() -> None:
    stated = Target(id=SAVING, source=("000",), description="", metric="saving", direction="min", value=99.9999)
    lengths = {point.seq_len for point in plan_attention({SAVING: stated}).points}
    assert lengths == set(attention_lengths._LENGTHS)


def test_verdicts_speak_of_the_models_own_length(record: AttentionRecord) -> None:
    verdicts = {(verdict.target, verdict.stack): verdict for verdict in judge_attention(record, TARGETS)}
    saving = verdicts["flash-attention-saving", "gpt2-small at 1024 tokens"]
    point = next(p for p in record.points if (p.model, p.seq_len) == ("gpt2-small", 1024))
    assert saving.value == point.saving_pct
    assert saving.status is (Status.HOLDS if point.saving_pct >= 99 else Status.REFUTED)
    border = next(p.seq_len for p in record.points if p.model == "gpt2-small" and p.saving_pct >= 99)
    assert f"99 % from {border:,} tokens on" in saving.reason
    assert verdicts["flash-attention-cost", "llama-7b at 2048 tokens"].evidence == "estimated"
    assert len(verdicts) == 4


def test_the_table_follows_from_the_newest_record(record: AttentionRecord, tmp_path: Path) -> None:
    assert write_attention([], TARGETS, tmp_path) == []
    append_attention(tmp_path, record)
    append_attention(tmp_path, record)
    assert read_attention(tmp_path) == [record, record]
    (path,) = write_attention(read_attention(tmp_path), TARGETS, tmp_path)
    assert attention_text(record, TARGETS, MARKDOWN) in path.read_text()


def test_a_record_of_another_version_is_refused(record: AttentionRecord, tmp_path: Path) -> None:
    path = append_attention(tmp_path, record)
    line = json.loads(path.read_text())
    path.write_text(json.dumps(line | {"schema": 7}) + "\n")
    with pytest.raises(Exception, match="schema: 7 must be 2"):
        read_attention(tmp_path)
