"""What the answer about a script says of itself: whole steps, bounds, refusals that were caught, growth."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybridtrain.cli.main import main
from hybridtrain.virtual_gpu.facade.basis import PlanBasis
from virtual_answer import virtual_answer

MIB = 2**20
HEAD = "import torch\nfrom torch import nn\n"


def planned(tmp_path: Path, body: str, *options: str) -> tuple[dict[str, Any], str]:
    """Return the answer as a mapping, and the verdict with its caveats."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + body)
    text, answer = virtual_answer(*([] if "--card" in options else ["--card", "rtx-4090"]), *options, "--", str(script))
    verdict = re.match(r"(FITS|FITS UNTIL .*|DOES NOT FIT): .*\n(  (?!speed |request |peak ).*\n)*", text)
    assert verdict is not None, text
    return answer, verdict[0]


def is_plain(verdict: str) -> bool:
    """Return whether a script fits without a caveat."""
    return verdict.startswith("FITS: ") and verdict.count("\n") == 1


TWO_OPTIMIZERS = """
body, head = nn.Linear(1024, 1024, bias=False).cuda(), nn.Linear(1024, 1024, bias=False).cuda()
optimizers = [torch.optim.AdamW(body.parameters()), torch.optim.AdamW(head.parameters())]
for step in range(20):
    head(body(torch.randn(4096, 1024, device="cuda"))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
"""
TURNS = """
critic, maker = nn.Linear(1024, 1024, bias=False).cuda(), nn.Linear(1024, 1024, bias=False).cuda()
first, second = torch.optim.AdamW(critic.parameters()), torch.optim.AdamW(maker.parameters())
for step in range(20):
    for _ in range(3):
        critic(torch.randn(4096, 1024, device="cuda")).sum().backward()
        first.step()
        first.zero_grad()
    maker(torch.randn(4096, 1024, device="cuda")).sum().backward()
    second.step()
    second.zero_grad()
"""
ONE_EACH = """
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2))).cuda()
optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}
def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for step in range(20):
    model(torch.randn(4096, 1024, device="cuda")).sum().backward()
"""
UNUSED = """
model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).cuda()
never = torch.optim.SGD(model.parameters())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.randn(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("body", [TWO_OPTIMIZERS, TURNS, ONE_EACH, UNUSED], ids=["both", "turns", "each", "unused"])
def test_a_step_is_an_iteration_of_every_optimizer(body: str, tmp_path: Path) -> None:
    two, verdict = planned(tmp_path, body, "--steps", "2")
    many, _ = planned(tmp_path, body)
    assert two["peak_allocated_bytes"] == many["peak_allocated_bytes"]
    assert two["by_class"]["optim_state"] == many["by_class"]["optim_state"] >= 16 * MIB
    assert two["step_time_s"] == pytest.approx(many["step_time_s"], rel=0.2)
    assert is_plain(verdict)
    assert two["basis"]["has_state"]
    assert many["basis"]["num_steps"] == 20


ONE_STEP = """
model = nn.Linear(1024, 1024).cuda()
optimizer = {optimizer}
for step in range({steps}):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("optimizer", "steps", "is_whole"),
    [
        ("torch.optim.AdamW(model.parameters())", 1, False),
        ("torch.optim.AdamW(model.parameters())", 2, True),
        ("torch.optim.SGD(model.parameters())", 1, True),
        ("torch.optim.SGD(model.parameters(), momentum=0.9)", 1, False),
        ("torch.optim.Adafactor(model.parameters())", 1, False),
    ],
)
def test_a_plan_whose_state_no_step_ran_beside_is_a_lower_bound(
    optimizer: str, steps: int, is_whole: bool, tmp_path: Path
) -> None:
    _, verdict = planned(tmp_path, ONE_STEP.format(optimizer=optimizer, steps=steps))
    assert is_plain(verdict) if is_whole else "\n  LOWER BOUND: no whole step ran with the" in verdict


BY_HAND = """
model = nn.Linear(64, 64).cuda()
for _ in range(100_000):
    {loss}.sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)
            p.grad = None
"""


def test_ctrl_c_ends_a_script_that_would_not_end_and_answers(tmp_path: Path) -> None:
    body = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters())
loss, steps = torch.ones(()), 0
while loss.item() > 1e-3:  # a loss that nobody computed does not fall
    if steps == {steps}:
        os.kill(os.getpid(), signal.SIGINT)
    loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    steps += 1
"""
    answer, verdict = planned(tmp_path, body.format(steps=3))
    assert verdict.startswith("FITS: ")
    assert answer["basis"]["num_steps"] == 3
    script = tmp_path / "script.py"
    script.write_text(HEAD + body.format(steps=0))
    assert main(["virtual", "--card", "rtx-4090", "--", str(script)]) == 130, "nothing to tell of"


@pytest.mark.parametrize(
    "loss",
    ['model(torch.randn(8, 64, device="cuda"))', '(torch.randn(8, 64, device="cuda") @ model.weight + model.bias)'],
)
def test_updates_by_hand_end_and_are_told(loss: str, tmp_path: Path) -> None:
    answer, verdict = planned(tmp_path, BY_HAND.format(loss=loss), "--steps", "2")
    assert answer["basis"]["num_backwards"] == 16
    assert "\n  LOWER BOUND: no step of a torch.optim optimizer ran" in verdict


COMPILES = {
    "decorator": "@torch.compile\ndef f(x):\n    return x.tanh()\n",
    "options": "@torch.compile(mode='max-autotune')\ndef f(x):\n    return x.tanh()\n",
    "call": "f = torch.compile(torch.tanh)\n",
    "module": "f = nn.Tanh()\nf.compile()\n",
    "import": "from torch import compile\nf = compile(torch.tanh)\n",
}
TRAINS = """
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    f(model(torch.randn({rows}, 1024, device="cuda"))).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("way", COMPILES)
@pytest.mark.parametrize(("rows", "outcome"), [("64", "FITS: "), ("2**21", "DOES NOT FIT: ")])
def test_compiled_code_is_planned_as_its_graphs(way: str, rows: str, outcome: str, tmp_path: Path) -> None:
    answer, verdict = planned(tmp_path, COMPILES[way] + TRAINS.format(rows=rows))
    assert verdict.startswith(outcome)
    assert "UPPER BOUND" not in verdict
    assert answer["basis"]["compiled"] == []
    assert "script.py:" in answer["basis"]["captured"][0]


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_code_for_another_compiler_is_an_upper_bound_and_the_verdict_says_so(backend: str, tmp_path: Path) -> None:
    script = f"f = torch.compile(torch.tanh, backend='{backend}')\n" + TRAINS.format(rows="64")
    _, verdict = planned(tmp_path, script)
    assert "UPPER BOUND: torch.compile at " in verdict
    assert f" (backend {backend})" in verdict
    assert "script.py:" in verdict


def test_what_is_not_compiled_is_no_upper_bound(tmp_path: Path) -> None:
    _, verdict = planned(tmp_path, "f = torch.compile(torch.tanh, disable=True)\n" + TRAINS.format(rows="64"))
    assert is_plain(verdict)


CAUGHT = """
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters())
out = model(torch.randn(8, 256, device="cuda"))
try:
    {attempt}
except {kind}:
    pass
for _ in range(2):
    model(torch.randn(8, 256, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("kind", ["Exception", "BaseException", "(RuntimeError, Exception)"])
@pytest.mark.parametrize(
    "attempt",
    [
        "out[out > 0]",
        "out.nonzero()",
        "torch.masked_select(out, out > 0)",
        "torch.unique(out)",
        "out[out > 0] = out[0]",
    ],
)
def test_a_refusal_that_a_script_catches_is_told(attempt: str, kind: str, tmp_path: Path) -> None:
    answer, verdict = planned(tmp_path, CAUGHT.format(attempt=attempt, kind=kind))
    (refusal,) = answer["basis"]["refusals"]
    assert "script.py:8" in refusal
    assert "ON THIS PATH ONLY" in verdict


def test_an_op_that_the_meta_device_lacks_is_told_where_a_script_catches_it(tmp_path: Path) -> None:
    lacking = "torch.ops.aten._cudnn_init_dropout_state(0.1, True, 1, dtype=torch.uint8, device=out.device)"
    answer, verdict = planned(tmp_path, CAUGHT.format(attempt=lacking, kind="Exception"))
    assert "has no meta rule for this op;" in answer["basis"]["refusals"][0]
    assert "ON THIS PATH ONLY" in verdict


def test_a_full_card_that_a_script_gets_over_is_told(tmp_path: Path) -> None:
    attempt = "torch.empty(40 * 2**30, dtype=torch.uint8, device='cuda')"
    answer, verdict = planned(tmp_path, CAUGHT.format(attempt=attempt, kind="torch.OutOfMemoryError"))
    assert answer["fits"]
    assert "Tried to allocate 40.00 GiB" in answer["basis"]["refusals"][0]
    assert "ON THIS PATH ONLY" in verdict


ENDS = {
    "exit": "raise SystemExit(f'loading failed: {error}') from None",
    "code": "sys.exit(1)",
    "at once": "os._exit(1)",
    "another": "raise ValueError('cannot load') from error",
    "hidden": "raise KeyError('model') from None",
    "later": "failed = True",
    "clean": "sys.exit(0)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_refusal_that_ends_a_script_decides_whatever_became_of_it(end: str, tmp_path: Path) -> None:
    body = f"""
import os
import sys
kept = torch.empty(2**30, dtype=torch.uint8, device="cuda")
try:
    torch.zeros(40 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    {ENDS[end]}
if failed:
    raise RuntimeError("no model")
"""
    answer, verdict = planned(tmp_path, body)
    assert "script.py runs out of memory on NVIDIA GeForce RTX 4090, before the first step" in verdict
    assert (answer["oom"]["requested_bytes"], answer["oom"]["allocated_bytes"]) == (40 * 2**30, 2**30)
    told = "UNCLEAR: the script caught this error, and then ended in RuntimeError: no model"
    assert (told in verdict) is (end == "later"), "the others name it as their cause, or end without another"


def test_state_that_no_longer_fits_is_state(tmp_path: Path) -> None:
    body = """
model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(1, 16384, device="cuda")).sum().backward()
optimizer.step()
"""
    answer, verdict = planned(tmp_path, body)
    assert "runs out of memory on NVIDIA GeForce RTX 4090, at step 1, update" in verdict
    held = answer["oom"]["by_class"]
    assert held["optim_state"] > 4 * held["workspace"]


LEAK = """
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = {kept}
for step in range({steps}):
    x = torch.randn({rows}, 1024, device="cuda")
    loss = torch.tanh(model(x)).sum()
    {keep}
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("keep", "size"),
    [
        ("kept.append(loss)", 8 * MIB + 512),
        ("kept.append(x.clone())", 4 * MIB),
        ("kept = kept + [loss.detach()]", 512),
    ],
    ids=["graphs", "copies", "losses"],
)
def test_growth_is_told_with_its_step_and_its_lines(keep: str, size: int, tmp_path: Path) -> None:
    body = LEAK.format(kept="[]", steps=5, keep=keep, rows=1024)  # as many as the guide asks for
    answer, verdict = planned(tmp_path, body)
    assert size <= answer["basis"]["growth"]["bytes_per_step"] + 512 <= size + 1024
    assert answer["reserved_range"] is None
    if size <= 512:  # a number per step fills no card
        assert is_plain(verdict)
        return
    assert "\n  GROWS: by " in verdict
    assert "the card is full at about step" in verdict
    assert any(f"script.py:{line}" in verdict for line in (8, 9, 10))


@pytest.mark.parametrize(
    ("keep", "rows", "per_step"),
    [
        ("kept.append(x.clone())", "128 * (1 + step % 3)", 1.0),
        ("if step % 4 == 0: kept.append(torch.empty(2**22, device='cuda'))", "64", 4.0),
        ("kept = [torch.cat([*kept, x.detach()])]", "512", 2.0),
        ("kept.append(torch.empty(2**20, device='cuda')); cache = x if step == 2 else None", "64 * (1 + step)", 4.0),
    ],
    ids=["mixed rows", "every fourth step", "one longer tensor", "longer rows"],
)
def test_growth_is_a_rate_whatever_else_changes(keep: str, rows: str, per_step: float, tmp_path: Path) -> None:
    answer, _ = planned(tmp_path, LEAK.format(kept="[]", steps=20, keep=keep, rows=rows))
    assert answer["basis"]["growth"]["bytes_per_step"] == pytest.approx(per_step * MIB, rel=0.05)


def test_the_step_at_which_growth_fills_the_card_is_where_it_fails(tmp_path: Path) -> None:
    body = LEAK.format(kept="[]", steps=200, keep="kept.append(loss)", rows=1024)
    card = tmp_path / "small.toml"
    card.write_text(
        'name = "small"\nmemory_mib = 1024\ncompute_capability = "8.9"\ntflops_bf16 = 10.0\ntflops_fp32 = 5.0\n'
        "memory_gbps = 200.0\npcie_gbps = 16.0\ncontext_mib = 100\n"
    )
    few, verdict_of_few = planned(tmp_path, body, "--card", str(card), "--steps", "8")
    told = int(re.search(r"full at about step ([\d,]+)", verdict_of_few)[1])
    whole, verdict = planned(tmp_path, body, "--card", str(card))
    assert abs(told - whole["oom"]["step"]) <= 2, "a step's own peak is above what stays"
    assert verdict_of_few.startswith(f"FITS UNTIL ABOUT STEP {told}: ")
    assert few["full_at_step"] == told
    assert not few["fits"]
    assert not whole["fits"]
    assert f"\n  GROWS: by {few['basis']['growth']['bytes_per_step'] // MIB}" in verdict


@pytest.mark.parametrize(
    ("kept", "keep", "rows", "steps"),
    [
        ("[]", "pass", "1024", 12),
        ("__import__('collections').deque(maxlen=3)", "kept.append(x)", "1024", 12),
        ("[]", "kept = [loss, x]", "1024", 12),
        ("[]", "pass", "128 * (1 + step)", 8),
        ("[]", "kept.append(loss)", "1024", 4),
        ("__import__('collections').deque(maxlen=6)", "kept.append(x)", "1024", 14),
        ("[]", "if step in (1, 3): kept.append(x)", "1024", 12),
        ("{}", "kept[step // 4] = x", "1024 if step < 8 else 8", 12),
        ("{}", "kept['table'] = x if step % 4 == 0 else kept['table']", "128 * (1 + step)", 16),
    ],
    ids=["nothing", "queue", "variables", "longer rows", "too few steps", "full cache", "twice", "three", "replaced"],
)
def test_what_does_not_grow_is_not_said_to(kept: str, keep: str, rows: str, steps: int, tmp_path: Path) -> None:
    answer, verdict = planned(tmp_path, LEAK.format(kept=kept, keep=keep, rows=rows, steps=steps))
    assert answer["basis"]["growth"] is None
    assert is_plain(verdict)


def test_evaluation_and_saving_are_seen(tmp_path: Path) -> None:
    body = TRAINS.format(rows="64").replace("f(", "(")
    nothing, _ = planned(tmp_path, body)
    assert (nothing["basis"]["num_evaluations"], nothing["basis"]["num_saves"]) == (0, 0)
    more = (
        f'with torch.no_grad():\n    model(torch.randn(2, 1024, device="cuda"))\ntorch.save(model, "{tmp_path}/m.pt")\n'
    )
    both, _ = planned(tmp_path, body + more)
    assert (both["basis"]["num_evaluations"], both["basis"]["num_saves"]) == (1, 1)


@pytest.mark.parametrize(
    ("work", "told"),
    [
        ("nn.Conv1d(64, 64, 3).cuda()(x)", None),
        ("torch.fft.rfft(x).real", "workspaces of cuFFT"),
        ("torch.linalg.qr(x)[0]", "workspaces of cuSOLVER"),
        ("torch.linalg.svdvals(x)", "workspaces of cuSOLVER"),
        ("(x @ x)", None),
    ],
)
def test_what_libraries_take_uncounted_is_told(work: str, told: str | None, tmp_path: Path) -> None:
    body = f"x = torch.randn(64, 64, device='cuda', requires_grad=True)\n{work}.sum()\n"
    answer, _ = planned(tmp_path, body)
    assert list(answer["basis"]["uncounted"]) == ([] if told is None else [told])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_told_to_be_approximate(kind: str, tmp_path: Path) -> None:
    body = f"model = nn.{kind}(8, 8).cuda()\nmodel(torch.randn(4, 2, 8, device='cuda'))[0].sum().backward()\n"
    _, verdict = planned(tmp_path, body)
    assert f"APPROXIMATE: {kind}: cuDNN does not document the size" in verdict
    assert "script.py:4" in verdict


def test_the_words_of_a_basis() -> None:
    basis = PlanBasis(
        versions={"torch": "2.13.0", "peft": "0.21"}, num_steps=1, num_backwards=4, has_state=True, num_evaluations=0,
        num_saves=2, compiled=(), captured=(), refusals=(), uncounted={}, approximated={}, growth=None,
    )  # fmt: skip
    told = "planned with torch 2.13.0, peft 0.21; eager code; seen: 1 whole step, no evaluation, saving"
    assert (basis.as_text(), basis.lower_bound, basis.upper_bound) == (told, "", "")


CHECKPOINTED = """
class Layer(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.gradient_checkpointing = {enabled}  # as transformers' layers


model = nn.Sequential(Layer()).cuda().{mode}()
model(torch.ones(2, 8, device="cuda")).sum().backward()
"""


@pytest.mark.parametrize(
    ("mode", "enabled", "is_told"), [("eval", True, True), ("train", True, False), ("eval", False, False)]
)
def test_gradient_checkpointing_in_eval_mode_is_told(mode: str, enabled: bool, is_told: bool, tmp_path: Path) -> None:
    _, verdict = planned(tmp_path, CHECKPOINTED.format(mode=mode, enabled=enabled))
    assert ("GRADIENT CHECKPOINTING IS INACTIVE: the model is in eval mode at " in verdict) is is_told


def test_the_speed_is_that_of_a_step_without_what_follows(tmp_path: Path) -> None:
    evaluation = "with torch.no_grad():\n    for _ in range(9): model(torch.randn(4096, 1024, device='cuda'))\n"
    saving = "torch.save(model.state_dict(), '/dev/null')\n"
    body = UNUSED.replace("range(20)", "range(2)")
    alone, _ = planned(tmp_path, body)
    followed, _ = planned(tmp_path, body + evaluation + saving)
    assert followed["step_time_s"] == alone["step_time_s"] > 0


def test_more_than_the_memory_that_is_allowed_is_a_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + UNUSED)
    command = ["virtual", "--card", "rtx-4090", "--steps", "2", "--json"]
    main([*command, "--", str(script)])
    used = json.loads(capsys.readouterr().out)["device_used_bytes"] // MIB
    for most, code, told in ((used, 0, "WITHIN"), (used - 1, 1, "ABOVE")):
        assert main([*command[:-1], "--max", f"{most}MiB", "--", str(script)]) == code
        assert capsys.readouterr().out.startswith(f"{told} --max {most}MiB")
