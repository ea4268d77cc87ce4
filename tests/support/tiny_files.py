"""Files as users write them, of a tiny model on a tiny card."""

CARD = """\
name = "Tiny card"
memory_mib = 64
compute_capability = "8.9"
tflops_bf16 = 100.0
tflops_fp32 = 50.0
memory_gbps = 500.0
pcie_gbps = 30.0
context_mib = 1
"""


def shape_file(*, num_blocks: int, tied: bool = False) -> str:
    """Return a file of a GPT-2 of width 32 on bytes."""
    text = f"""\
family = "gpt2"
vocab_size = 256
max_seq_len = 16
num_blocks = {num_blocks}
width = 32
num_heads = 2
num_kv_heads = 2
ffn_width = 64
"""
    return text + "tied = true\n" * tied


def scenario_file(
    stacks: list[str], shape: str, *, seq_len: int, num_steps: int, targets: str = "", card: str = CARD
) -> str:
    """Return a file of the scenario ``mine``; its proxies are of the same shape and take ``num_steps`` steps."""
    names = ", ".join(f'"{name}"' for name in stacks)
    return f"""\
name = "mine"
description = "A tiny model"
stacks = [{names}]

[model.shape]
{shape}
[card.custom]
{card}
[workload]
batch_size = 2
seq_len = {seq_len}

[accuracy]
seeds = [0, 1, 2]
num_steps = {num_steps}
batch_size = 4
seq_len = 16
lr = 1e-2
validation_batches = 4

[accuracy.proxy]
{shape}{targets}"""


def training_file(*, num_blocks: int = 1, more: str = "") -> str:
    """Return a file of a run of four steps that saves every second one."""
    return f"""\
num_steps = 4
save_every = 2
sample_tokens = 0
[model.shape]
{shape_file(num_blocks=num_blocks, tied=True)}[workload]
batch_size = 2
seq_len = 8
{more}"""
