"""Scripts of others at 7 to 9B parameters, as they are installed, under ``hybridtrain virtual``: time and memory.

``python benchmarks/virtual_scripts.py`` runs those whose packages are installed and writes their lines into
results/virtual-scripts.md; peers pin each other apart, so lines of an earlier run in another environment stay. Nothing
is downloaded: checkpoints are saved under the virtual card first, shapes without values.
"""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from public_scripts import answer_of, run_child

from hybridtrain.units import to_gib

PAGE = Path(__file__).resolve().parent.parent / "results" / "virtual-scripts.md"
_MOST_SECONDS = 600
_SECONDS, _GIB = 15.0, 2.0
"""What a plan of two or three steps should stay below: our own target."""
_HEADER = f"""\
# Scripts of others at 7 to 9B parameters

Made by `python benchmarks/virtual_scripts.py`, once in each peer's environment: commands as they are installed, under
`hybridtrain virtual` on an RTX 4090 with memory without limit, until their own end: checkpoints
loaded, trained, saved. **Planned**: nothing is computed. Seconds are wall-clock time on a shared machine, and time of
the processor, both with all imports; RAM: largest resident memory of the process, GiB. Target of each, our own: at most
{_SECONDS:g} s of the processor, a script's imports and the checkpoint that it saves among them, and {_GIB:g} GiB.

| script | what | parameters | steps | allocated | reserved | wall s | processor s | RAM | target |
|---|---|--:|--:|--:|--:|--:|--:|--:|---|
"""
_WORDS = """
import json
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers

def tokenizer(folder):
    words = ["[UNK]", "<s>", "</s>", *(f"w{number}" for number in range(61))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    Path(folder).mkdir(parents=True)
    return made
"""
_PREPARE_TRL = f"""{_WORDS}
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from hybridtrain.virtual_gpu import VirtualGpu
named = {{"unk_token": "[UNK]", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}}
PreTrainedTokenizerFast(tokenizer_object=tokenizer("base"), **named).save_pretrained("base")
config = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)
with VirtualGpu("rtx-4090"):
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained("base")
Path("data").mkdir()
row = json.dumps({{"text": " ".join(f"w{{number % 61}}" for number in range(3000))}})
Path("data/train.jsonl").write_text(f"{{row}}\\n" * 8)
"""
_PREPARE_LITGPT = f"""{_WORDS}
import torch
from litgpt import GPT, Config
from litgpt.utils import save_config
from hybridtrain.virtual_gpu import VirtualGpu
tokenizer("base").save("base/tokenizer.json")
named = {{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}}
Path("base/tokenizer_config.json").write_text(json.dumps(named))
config = Config.from_name("Llama-3.1-8B")
save_config(config, Path("base"))
with VirtualGpu("rtx-4090"):
    torch.save({{name: value.bfloat16() for name, value in GPT(config).state_dict().items()}}, "base/lit_model.pth")
row = {{"instruction": " ".join(f"w{{number % 61}}" for number in range(3000)), "input": "", "output": "w3 w4"}}
Path("data.json").write_text(json.dumps([row] * 10))
Path("random_tokens.py").write_text('''
from dataclasses import dataclass
import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader

@dataclass
class RandomTokens(DataModule):
    # tokens at random

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=-1):
        self.batch_size, self.length = batch_size, max_seq_length + 1

    def train_dataloader(self):
        return DataLoader(torch.randint(0, 64, (4, self.length)), batch_size=self.batch_size)

    val_dataloader = train_dataloader
''')
"""
_SFT = (
    "-m trl.scripts.sft --model_name_or_path base --dataset_name ./data --output_dir out --max_steps 2 "
    "--dtype bfloat16 --per_device_train_batch_size 1 --gradient_accumulation_steps 1 --max_length 2048 "
    "--report_to none --gradient_checkpointing"
)
_LIT_SIZE = "--train.global_batch_size 1 --train.micro_batch_size 1 --train.max_seq_length 2048 --out_dir out"
_PRETRAIN = (
    "-m litgpt pretrain Llama-3.1-8B --data random_tokens.RandomTokens --tokenizer_dir base --precision bf16-true "
    f"--logger_name csv --train.max_tokens 4096 {_LIT_SIZE}"
)
_FINETUNE = (
    "-m litgpt finetune_lora base --data JSON --data.json_path data.json --data.val_split_fraction 0.2 "
    "--data.num_workers 0 --precision bf16-true --train.max_steps 2 --train.epochs 1 --train.lr_warmup_steps 1 "
    f"--eval.max_new_tokens 4 {_LIT_SIZE}"
)
_SCRIPTS = (
    ("trl", _PREPARE_TRL, "TRL's sft, full", _SFT),
    ("trl", _PREPARE_TRL, "TRL's sft, LoRA", f"{_SFT} --use_peft --lora_r 16"),
    ("trl", _PREPARE_TRL, "TRL's sft, QLoRA", f"{_SFT} --use_peft --lora_r 16 --load_in_4bit"),
    ("litgpt", _PREPARE_LITGPT, "LitGPT's pretrain", _PRETRAIN),
    ("litgpt", _PREPARE_LITGPT, "LitGPT's finetune_lora", _FINETUNE),
)
_CARD = """\
name = "NVIDIA GeForce RTX 4090 with 4 TiB"
memory_mib = 4194304
compute_capability = "8.9"
tflops_bf16 = 165.2
tflops_fp32 = 82.6
memory_gbps = 1008.0
pcie_gbps = 31.5
"""


def main() -> None:
    """Run what is installed; keep the other lines."""
    lines = {}
    if PAGE.is_file():
        kept = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
        lines = {line.split(" | ")[1]: line for line in kept}
    for package, prepare, name, command in _SCRIPTS:
        if find_spec(package) is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            lines[name] = run(package, prepare, name, command, Path(folder))
        print(lines[name], flush=True)
        order = [name for _, _, name, _ in _SCRIPTS if name in lines]
        PAGE.write_text(_HEADER + "\n".join(lines[name] for name in order) + "\n", encoding="utf-8")


def run(package: str, prepare: str, name: str, command: str, folder: Path) -> str:
    """Prepare an empty folder, run the command in it; return its line."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-c", prepare], check=True, cwd=folder, env=environment, stdout=sys.stderr)
    (folder / "card.toml").write_text(_CARD)
    options = ["virtual", "--card", "card.toml", "--json", "--", *command.split()]
    done = run_child([sys.executable, "-m", "hybridtrain", *options], folder, environment, _MOST_SECONDS)
    first, answer = f"| {package} {version(package)} | {name} |", answer_of(done["out"])
    if done["code"] or answer is None:
        return f"{first} {done['tail'].splitlines()[-1]} | | | | | | | |"
    ram = to_gib(done["rss"])
    is_met = done["seconds"] <= _SECONDS and ram <= _GIB
    missing = f"; {len(answer['without_gradient'])} parameters without gradient" if answer["without_gradient"] else ""
    return (
        f"{first} {answer['params']:,} | {len(answer['steps'])} | {to_gib(answer['peak_allocated_bytes']):.2f} | "
        f"{to_gib(answer['peak_reserved_bytes']):.2f} | {done['wall']:.1f} | {done['seconds']:.1f} | {ram:.2f} | "
        f"{'met' if is_met else 'MISSED'}{missing} |"
    )


if __name__ == "__main__":
    main()
