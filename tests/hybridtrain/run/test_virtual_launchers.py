"""Scripts that launchers start, and what they ask of a machine with a card: as they stand."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtrain.cli.main import main
from hybridtrain.virtual_gpu import VirtualGpu
from hybridtrain.virtual_gpu.facade.launchers import PythonCommand, python_command
from virtual_answer import virtual_answer

pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler:UserWarning")  # of captured output

RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group({init})
local = int(os.environ.get("LOCAL_RANK", 0))
torch.cuda.set_device(local)
model = DistributedDataParallel(torch.nn.Linear(1024, 1024).cuda(), device_ids=[local])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("world", dist.get_world_size(), "arguments", sys.argv[1:], dist.get_backend())
"""
INIT = 'backend="nccl"'
ALONE = 'backend="nccl", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1'


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK.format(init=INIT))
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = main(["virtual", "--card", "rtx-4090", "--json", *words])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


LAUNCHES = {
    "--world": (["--world", "{n}", "--"], [], []),
    "module": (["--", "-m", "torch.distributed.run"], ["--nproc_per_node={n}"], ["--lr", "1"]),
    "command": (["--", "torchrun"], ["--standalone", "--nproc-per-node", "{n}"], []),
    "interpreter": (["--", "python", "-u", "-m", "torch.distributed.run"], ["--nproc_per_node", "{n}"], ["a"]),
    "both": (["--world", "{n}", "--", "torchrun"], ["--nproc_per_node={n}"], []),
}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launcher_starts_the_script_on_the_virtual_card(
    launch: str, number: int, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, options, after = ([w.format(n=number) for w in words] for words in LAUNCHES[launch])
    text, found = virtual_answer("--card", "rtx-4090", *before, *options, str(script), *after)
    assert (found["world"], found["basis"]["num_steps"]) == (number, 2)
    assert text.startswith(f"FITS: {script} takes "), "not the launcher"
    assert f"world {number} arguments {after} nccl" in capsys.readouterr().out
    weights = 1024 * 1025 * 4
    assert found["by_class"]["weight"] == weights
    assert found["peak_allocated_bytes"] > 5 * weights, "weights, gradients, state, and the buckets of DDP"


def test_a_world_of_another_size_than_the_launchers_is_refused(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["virtual", "--card", "rtx-4090", "--world", "4", "--", "torchrun", "--nproc_per_node=2", str(script)])
    assert code == 2
    assert "the launcher starts 2 processes, but --world is 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("accelerate", ["launch", "--num_processes", "2", "train.py"], 2),
        ("trl", ["sft", "--num-processes=3"], 3),
        ("accelerate", ["launch", "train.py"], 1),
        ("prepare.py", ["--num_processes", "8"], 1),
    ],
)
def test_a_launcher_that_counts_cards_finds_one_for_each_process(
    name: str, options: list[str], expected: int, tmp_path: Path
) -> None:
    path, told = tmp_path / name, tmp_path / "told"
    path.write_text(f"import torch, pathlib\npathlib.Path({str(told)!r}).write_text(str(torch.cuda.device_count()))\n")
    command = python_command([str(path), *options])
    assert command is not None
    with VirtualGpu("rtx-4090"):
        command.run()
        assert (told.read_text(), torch.cuda.device_count()) == (str(expected), 1)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch", "python -u"])
def test_a_launcher_of_no_script_is_one_fault(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not shutil.which(launcher.split(maxsplit=1)[0]):
        pytest.skip("not installed")
    assert main(["virtual", "--card", "rtx-4090", "--", *launcher.split(), "nosuch.py"]) == 2
    err = capsys.readouterr().err
    assert "script 'nosuch.py' does not exist" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("way", ["environment", "arguments"])
def test_a_script_may_be_a_world_of_one_by_itself(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "alone.py"
    path.write_text(RANK.format(init=INIT if way == "environment" else ALONE))
    if way == "environment":
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
    code, found, _ = answer(capsys, "--", str(path))
    assert (code, found["world"], found["basis"]["num_steps"]) == (0, 1, 2)


CHILD = """
import os, subprocess, sys
code = subprocess.{call}
print("child", code)
"""
TRAIN = """
import os, sys, torch
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
print(sys.argv[1:], os.environ.get("MARK"), os.getcwd())
"""


@pytest.mark.parametrize(
    "call",
    [
        "run([sys.executable, '{train}', 'x'], env={{**os.environ, 'MARK': '7'}}, cwd='{folder}').returncode",
        "call(['python3', '-u', '{train}', 'x'], env=os.environ | {{'MARK': '7'}}, cwd='{folder}')",
        "Popen([sys.executable, '-X', 'dev', '{train}', 'x'], env={{'MARK': '7'}}, cwd='{folder}').wait()",
    ],
)
def test_a_python_process_that_a_script_starts_has_the_card(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    train, parent = tmp_path / "train.py", tmp_path / "parent.py"
    train.write_text(TRAIN)
    parent.write_text(CHILD.format(call=call.format(train=train, folder=folder)))
    before = Path.cwd()
    code, found, err = answer(capsys, "--", str(parent))
    assert (code, found["basis"]["num_steps"]) == (0, 2)
    assert f"['x'] 7 {folder}" in err
    assert "child 0" in err
    assert (Path.cwd(), os.environ.get("MARK")) == (before, None)


def test_other_processes_run_as_they_do() -> None:
    with VirtualGpu("rtx-4090"):
        told = subprocess.run(["/bin/echo", "a"], capture_output=True, text=True, check=True)
        python = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, check=True)
        failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        assert (told.stdout, python.stdout, failed.wait()) == ("a\n", "1\n", 3)


def test_what_a_command_line_runs_in_python(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("")
    for words in (
        [str(path), "-x"],
        ["python", str(path), "-x"],
        [sys.executable, "-u", "-W", "error", str(path), "-x"],
    ):
        assert python_command(words) == PythonCommand(str(path), False, ("-x",))
    assert python_command(["python3.11", "-m", "a.b", "-x"]) == PythonCommand("a.b", True, ("-x",))
    for words in ([], ["-m"], ["python"], ["python", "-c", "1"], ["ls"], [str(tmp_path / "none.py")]):
        assert python_command(words) is None


def test_a_script_that_starts_others_apart_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "parent.py"
    path.write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1'], capture_output=True)\n")
    assert main(["virtual", "--card", "rtx-4090", "--", str(path)]) == 2
    assert "nothing was put on the card; does it choose the CPU, or start other processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "NVIDIA GeForce RTX 4090"),
        (["-L"], "GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-"),
        (["--query-gpu=name,memory.total", "--format=csv"], "name, memory.total [MiB]\nNVIDIA GeForce RTX 4090, 2"),
        (["--query-gpu=index,driver_version", "--format=csv,noheader,nounits"], "0, 580."),
        (["--query-gpu=name", "--format=csv,noheader", "-i", "0"], "NVIDIA GeForce RTX 4090\n"),
        (["-q", "-d", "MEMORY"], "Total : 24564 MiB"),
        ([], "CUDA Version: 13.0"),
        (["--query-compute-apps=pid,used_memory", "--format=csv"], "pid, used_memory\n"),
        (["--query-gpu=fan.speed", "--format=csv,noheader"], "[N/A]"),
        (["--query-gpu", "compute_cap", "--format", "csv,noheader"], "8.9"),
    ],
)
def test_the_machine_of_a_virtual_card_has_nvidia_smi(options: list[str], told: str) -> None:
    with VirtualGpu("rtx-4090"):
        found = subprocess.run(
            [shutil.which("nvidia-smi"), *options], capture_output=True, text=True, check=True
        ).stdout
    assert told in found


@pytest.mark.parametrize(
    ("card", "version", "arch"),
    [("rtx-4090", "13.0", "sm_86"), ("h100-sxm", "13.0", "sm_90"), ("v100-16gb", "12.6", "sm_70")],
)
def test_torch_is_the_wheel_that_runs_on_the_card(card: str, version: str, arch: str) -> None:
    with VirtualGpu(card):
        assert torch.version.cuda == version
        assert arch in torch.cuda.get_arch_list()
        assert "code=" + arch in torch.cuda.get_gencode_flags()


def test_torch_is_one_that_was_built_with_cuda() -> None:
    with VirtualGpu("rtx-4090"):
        assert torch.backends.cuda.is_built()
        assert torch.backends.cuda.is_flash_attention_available()
        assert torch.cuda.nccl.is_available([torch.ones(1, device="cuda")])
        with torch.cuda.device("cuda:0") as _, torch.cuda.device(0):
            assert torch.cuda._utils._get_device_index("cuda:0") == 0
        assert torch.backends.cudnn.is_available()
        assert torch.backends.cudnn.version() > 90000
        assert torch.backends.cudnn.is_acceptable(torch.ones(1, device="cuda"))
        assert not torch.backends.cudnn.is_acceptable(torch.ones(1))
        assert torch.distributed.is_nccl_available()
        assert torch.cuda.nccl.version() >= (2, 10)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript_runs_as_the_code_that_it_was_made_of() -> None:
    with VirtualGpu("rtx-4090") as gpu:

        @torch.jit.script
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor(2.0) + torch.zeros([1], device=x.device)

        traced = torch.jit.trace(torch.nn.Linear(8, 8).cuda(), torch.ones(1, 8, device="cuda"))
        assert traced(scaled(torch.ones(4, 8, device="cuda"))).shape == (4, 8)
        assert gpu.basis().compiled[0].startswith("torch.jit.script at ")
    assert isinstance(torch.jit.script(_doubled), torch.jit.ScriptFunction)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_data_parallel_of_one_card_is_its_module_and_of_several_is_refused() -> None:
    with VirtualGpu("rtx-4090"):
        model = torch.nn.DataParallel(torch.nn.Linear(8, 8)).cuda()
        assert model(torch.ones(4, 8)).is_cuda
        model.device_ids = [0, 1]
        with pytest.raises(NotImplementedError, match="DataParallel over 2 cards is not supported;"):
            model(torch.ones(4, 8))


FSDP = """
import os, torch
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("nccl")
with torch.device("meta"):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cuda")
for layer in model:
    {init}
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "init",
    [
        "layer.reset_parameters()",
        "torch.nn.init.kaiming_uniform_(layer.weight)",
        "torch.nn.init.trunc_normal_(layer.weight, std=0.02)",
        "torch.nn.init.normal_(layer.weight)",
        "layer.weight.data.normal_()",
        "torch.nn.init.zeros_(layer.bias)",
    ],
)
def test_fsdp_from_meta_initializes_and_trains(init: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fsdp.py"
    path.write_text(FSDP.format(init=init))
    code, found, _ = answer(capsys, "--world", "2", "--", str(path))
    assert (code, found["basis"]["num_steps"]) == (0, 2)
    assert found["by_class"]["optim_state"] == 2 * 3 * (1024 * 1025 * 4) // 2


def test_python_under_a_shell_and_a_pipe_has_the_card(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "run.sh").write_text(f"nvidia-smi -L\nMARK=7 '{sys.executable}' -u '{tmp_path}/train.py' x | tail -1\n")
    code = main(["virtual", "--card", "rtx-4090", "--json", "--", "bash", str(tmp_path / "run.sh")])
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert (code, found["basis"]["num_steps"], found["by_class"]["weight"]) == (0, 2, 1024 * 1025 * 4)
    assert "GPU 0: NVIDIA GeForce RTX 4090" in err
    assert f"['x'] 7 {Path.cwd()}" in err


def test_a_program_under_which_nothing_uses_the_card_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["virtual", "--card", "rtx-4090", "--", "bash", "-c", "exit 3"]) == 2
    assert "bash: exited with code 3, and no Python that it started used the card" in capfd.readouterr().err
    assert "PYTHONPATH" not in os.environ or "hybridtrain-child" not in os.environ["PYTHONPATH"]
