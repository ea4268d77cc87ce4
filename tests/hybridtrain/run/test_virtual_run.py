"""``hybridtrain virtual``: scripts as others write them, run as they stand."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.main import main
from virtual_answer import virtual_answer

SCRIPT = '''"""A training script in the manner of nanoGPT."""
import argparse
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--json", action="store_true")
parser.add_argument("--steps", type=int, default=3)
arguments = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
torch.backends.cuda.matmul.allow_tf32 = True


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down, self.drop = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (t.view(*t.shape[:2], 4, 16).transpose(1, 2) for t in self.qkv(self.norm(x)).split(64, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(512, 64), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 512, bias=False)
        self.embed.weight = self.head.weight

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 512), targets.view(-1))


model = torch.compile(Model().to(device))
scaler = torch.amp.GradScaler(device, enabled=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
data = torch.randint(0, 512, (10000,))
for step in range(arguments.steps):
    start = torch.randint(len(data) - 65, (arguments.batch,))
    ids = torch.stack([data[i : i + 64] for i in start]).pin_memory().to(device, non_blocking=True)
    targets = torch.stack([data[i + 1 : i + 65] for i in start]).pin_memory().to(device, non_blocking=True)
    with torch.amp.autocast(device_type=device, dtype=getattr(torch, dtype)):
        loss = model(ids, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    if math.isnan(loss.item()):
        sys.exit(3)
    print(f"step {step} of {sys.argv[0]}: {torch.cuda.max_memory_allocated()} bytes")
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_runs_as_it_stands(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["virtual", "--card", "rtx-3090", "--explain", "--", str(script), "--batch", "3"]) == 0
    out = capsys.readouterr().out
    assert "step 2 of" in out
    assert "by module" in out
    assert "train.py:" in out  # where a number was read that nobody computed
    assert f"\nFITS: {script} takes " in out
    assert "BOUND" not in out
    assert "compiled code planned as its graphs; seen: 3 whole steps, no evaluation, no saving" in out


def test_json_is_one_object_with_the_keys_of_a_dry_run(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = [tmp_path / "run.pickle", tmp_path / "run.json"]
    options = ["--steps", "1", "--json", "--snapshot", str(written[0]), "--trace", str(written[1])]
    assert main(["virtual", "--card", "rtx-3090", "--host-memory", "8GiB", *options, "--", str(script), "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert "step 0" not in captured.err  # stopped by the update, before the script could say so
    assert answer["fits"] is True
    assert len(answer["steps"]) == 1
    assert answer["by_module"]["head"] > 0
    assert answer["params"] == 512 * 64 + 2 * (128 + 192 * 65 + 64 * 65 + 256 * 65 + 64 * 257)
    assert all(path.stat().st_size > 1000 for path in written)
    size = ["--micro-batch", "1", "--seq", "8"]
    assert main(["dry-run", "--model", "gpt2-small", "--stack", "tight", "--card", "rtx-3090", *size, "--json"]) == 0
    of_a_dry_run = json.loads(capsys.readouterr().out).keys()
    assert of_a_dry_run - answer.keys() == {
        "changes",
        "link",
        "phases",
        "ranks",
        "savings",
    }  # of a declared stack: a script has none


def test_a_full_card_ends_the_script_and_says_where(script: Path, tmp_path: Path) -> None:
    card = tmp_path / "small.toml"
    card.write_text(
        'name = "small"\nmemory_mib = 480\ncompute_capability = "8.9"\ntflops_bf16 = 10.0\ntflops_fp32 = 5.0\n'
        "memory_gbps = 200.0\npcie_gbps = 16.0\ncontext_mib = 426\n"
    )
    told, answer = virtual_answer("--card", str(card), "--", str(script), "--batch", "512")
    assert told.startswith(f"DOES NOT FIT: {script} needs ")
    assert " of 480.00 MiB and runs out of memory on small, at step 1, forward" in told
    assert "speed" not in told  # a step that did not end has no time
    assert answer["step_time_s"] is None
    assert not answer["fits"]


def test_a_script_within_the_margin_fits_barely(script: Path, tmp_path: Path) -> None:
    card = tmp_path / "small.toml"

    def run(memory_mib: int) -> tuple[str, dict[str, Any]]:
        card.write_text(
            f'name = "small"\nmemory_mib = {memory_mib}\ncompute_capability = "8.9"\ntflops_bf16 = 10.0\n'
            "tflops_fp32 = 5.0\nmemory_gbps = 200.0\npcie_gbps = 16.0\ncontext_mib = 400\n"
        )
        return virtual_answer("--card", str(card), "--explain", "--", str(script))

    used_mib = run(8192)[1]["device_used_bytes"] // 2**20  # segments and context are whole MiB
    told, answer = run(used_mib)
    assert f"FITS BARELY: {script} takes " in told
    assert "(planned); within the margin of 5 % " in told
    assert "small: its file states no source for capacity" in told
    assert (answer["fits"], answer["verdict"]) == (True, "fits barely")
    assert run(used_mib * 2)[0].startswith("FITS: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("raise SystemExit(7)", "exited with code 7"),
        ("print(1)", "nothing was put on the card"),
    ],
)
def test_a_script_that_does_not_train_is_told(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(content)
    assert main(["virtual", "--card", "rtx-3090", "--", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_script_is_told_and_an_error_is_the_scripts_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["virtual", "--card", "rtx-3090", "--", str(tmp_path / "no.py")]) == 2
    assert "does not exist; give a Python file" in capsys.readouterr().err
    assert main(["virtual", "--card", "rtx-3090"]) == 2
    assert "SCRIPT: missing" in capsys.readouterr().err
    path = tmp_path / "wrong.py"
    path.write_text("import torch\ntorch.ones(3, device='cuda') + torch.ones(4)\n")
    assert main(["virtual", "--card", "rtx-3090", "--", str(path)]) == 1
    told = capsys.readouterr().err
    assert f"{path} raised an error of its own" in told
    assert f'File "{path}", line 2' in told
    assert "cuda:0 and cpu!" in told
    assert "virtual_run.py" not in told


def test_a_script_that_compiles_cuda_code_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text("raise OSError('CUDA_HOME environment variable is not set.')\n")  # as torch.utils.cpp_extension
    assert main(["virtual", "--card", "rtx-4090", "--", str(path)]) == 2
    err = capsys.readouterr().err
    assert "train.py: compiles CUDA code, for which there is no toolkit here" in err
    assert "Traceback" not in err
