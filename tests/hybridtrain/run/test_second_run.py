"""What a script needs that ran out of memory, and what would lower it."""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtrain.cli.main import main
from hybridtrain.virtual_gpu.facade.savings import cheapest
from virtual_answer import virtual_answer

MIB = 2**20
CARD = """
name = "small"
memory_mib = {mib}
compute_capability = "8.9"
tflops_bf16 = 10.0
tflops_fp32 = 5.0
memory_gbps = 200.0
pcie_gbps = 16.0
context_mib = 400
"""
BLOCKS = """
import sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
rows = int(sys.argv[1])
first, last = next((word[2:].split("-") for word in sys.argv if word.startswith("ck")), ("9", "9"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if int(first) <= number <= int(last) else layer(x)
        return x


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused="fused" in sys.argv)
for step in range(10):
    model(torch.randn(rows, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("end", file=sys.stderr)
"""


class Planner:
    """Plans scripts on a card of some MiB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, mib: int, body: str, *arguments: str) -> dict[str, Any]:
        (self.folder / "card.toml").write_text(CARD.format(mib=mib))
        (self.folder / "train.py").write_text(body)
        card = str(self.folder / "card.toml")
        return virtual_answer("--card", card, "--", str(self.folder / "train.py"), *arguments)[1]


@pytest.fixture
def plan(tmp_path: Path) -> Planner:
    return Planner(tmp_path)


def test_what_the_whole_run_needs_is_the_least_card_on_which_it_fits(plan: Planner) -> None:
    failed = plan(800, BLOCKS, "4096")
    needed = failed["whole_run"]["needed_bytes"]
    assert failed["oom"] is not None
    assert failed["whole_run"]["missing_bytes"] == needed - 800 * MIB
    assert failed["basis"]["ended_at"].endswith("train.py:16")
    assert plan(-(-needed // MIB), BLOCKS, "4096")["fits"]
    assert not plan(int(0.97 * needed) // MIB, BLOCKS, "4096")["fits"], "the need is found to 1 %"


def test_each_technique_saves_what_the_script_saves_with_it(plan: Planner) -> None:
    told = plan(800, BLOCKS, "4096")["whole_run"]["with"]
    for technique, arguments in {
        "gradient checkpointing": ("4096", "ck0-5"),
        "half the batch": ("2048",),
    }.items():
        needed = plan(500, BLOCKS, *arguments)["whole_run"]["needed_bytes"]
        assert told[technique] == pytest.approx(needed, rel=0.04), "blocks' results are freed in another order"
    assert max(told, key=told.get) != "gradient checkpointing"


def test_of_some_blocks_those_are_told_with_which_the_run_fits(plan: Planner) -> None:
    mib = 900
    told = plan(mib, BLOCKS, "4096")["whole_run"]["with"]
    (some,) = [re.fullmatch(r"gradient checkpointing of layers.(\d) to layers.(\d) \((\d) of 6 blocks, .*\)", name)
               for name in told if " of " in name]  # fmt: skip
    assert some is not None
    first, last, count = map(int, some.groups())
    assert 0 < count == last - first + 1 < 6
    fewer, as_told = (plan(mib, BLOCKS, "4096", f"ck{first}-{end}") for end in (last - 1, last))
    assert fewer["verdict"] != "fits"
    assert as_told["verdict"] == "fits"
    assert told[some[0]] == pytest.approx(as_told["device_used_bytes"], rel=0.05)


@settings(max_examples=200, deadline=None)
@given(
    items=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=9),
    share=st.floats(0.01, 1.2),
)
def test_the_choice_of_blocks_is_the_cheapest_of_all(items: list[tuple[int, int]], share: float) -> None:
    gains, costs = zip(*items, strict=True)
    least = max(1, int(share * sum(gains)))
    enough = [
        sum(costs[place] for place in chosen)
        for size in range(1, len(items) + 1)
        for chosen in combinations(range(len(items)), size)
        if sum(gains[place] for place in chosen) >= least
    ]
    found = cheapest(gains, costs, least)
    assert bool(found) == bool(enough)
    if enough:
        assert sum(gains[place] for place in found) >= least
        assert sum(costs[place] for place in found) == min(enough)


def test_a_fused_update_and_8_bit_state_are_told_where_they_save(plan: Planner) -> None:
    told = plan(500, BLOCKS, "64")["whole_run"]
    plain, state = told["needed_bytes"], 2 * 6 * 2 * 512 * 2048 * 4
    assert plain - told["with"]["8-bit optimizer state"] == pytest.approx(state * 0.746, abs=20 * MIB), "one segment"
    assert told["with"]["fused=True in the optimizer"] < plain
    assert "fused=True in the optimizer" not in plan(500, BLOCKS, "64", "fused")["whole_run"]["with"]


SEARCH = """
import torch
rows = 2**20
while True:
    try:
        x = torch.empty(rows, 1024, device="cuda")
        break
    except torch.OutOfMemoryError:
        rows //= 2
weight = torch.ones(4, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
optimizer.step()
print(rows)
"""


def test_a_script_that_searches_for_a_batch_sees_the_error_and_runs_once(plan: Planner) -> None:
    found = plan(800, SEARCH)
    assert found["fits"]
    assert found["whole_run"] is None
    assert 2**16 * 4096 <= found["peak_allocated_bytes"] < 2**17 * 4096


def test_the_answer_is_short_and_begins_with_need_and_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card, script = tmp_path / "card.toml", tmp_path / "train.py"
    card.write_text(CARD.format(mib=800))
    script.write_text(BLOCKS)
    assert main(["virtual", "--card", str(card), "--", str(script), "4096"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("DOES NOT FIT: ")
    assert " of 800.00 MiB and runs out of memory on small, at step 1, forward layers." in lines[0]
    assert lines[1].startswith("  missing ")
    assert "gradient checkpointing " in out
    assert "end" not in err, "the second run is silent"
    assert len(lines) <= 10


def test_a_second_run_that_fails_by_itself_is_told(plan: Planner, tmp_path: Path) -> None:
    body = f"""
import os
import torch
os.mkdir(r"{tmp_path}/out")
torch.empty(2**30, dtype=torch.uint8, device="cuda")
"""
    whole = plan(800, body)["whole_run"]
    assert whole["problem"].startswith("FileExistsError")
