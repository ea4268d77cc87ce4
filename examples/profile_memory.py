"""Where does the memory go? A plan, the same steps executed, and the profile of a run, for a small model."""

# %% The plan: who holds the peak, and when it is.
import csv
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from hybridtrain import DirectTransfer, ModelConfig, Trainer, TrainerConfig, Workload, compose, dry_run, find_card
from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.optimizations import GradientCheckpointing, MixedPrecision
from hybridtrain.phase import Phase
from hybridtrain.profiler.memory_profiler import MemoryProfiler
from hybridtrain.virtual_gpu.account.ledger import StorageLedger
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass

model = ModelConfig(
    family="gpt2", vocab_size=256, max_seq_len=128, num_blocks=4, width=128, num_heads=4, num_kv_heads=4, ffn_width=512
)
stack = [MixedPrecision(), GradientCheckpointing(recompute_every=1)]
work = Workload(micro_batch_size=4, seq_len=128)
planned = dry_run(model, compose(stack), find_card("rtx-4090"), work)
print(planned.summary())

# %% Each optimization of the stack, by leaving it out.
for item in stack:
    rest = dry_run(model, compose([other for other in stack if other is not item]), find_card("rtx-4090"), work)
    print(f"without {item.kind}: {rest.peak.allocated_bytes - planned.peak.allocated_bytes:+,} B at the peak")

# %% The same steps on the processor: the ledger counts the memory of a card, the profiler that of the process.
ledger = StorageLedger(record=False)
with ledger, MemoryProfiler() as profiler:
    trainer = Trainer(model, compose(stack), TrainerConfig(), DirectTransfer(torch.device("cpu")), ledger)
    sampler = BatchSampler(embedded_corpus(1 << 20).train, micro_batch_size=4, seq_len=128, seed=0)
    for step in range(2):
        ledger.begin_step()
        done = trainer.step([sampler.batch(step, 0)])
        profiler.record_step(done.step, Phase.FULL)
print(profiler.report())
tensors = planned.peak.allocated_bytes - planned.by_class()[TensorClass.WORKSPACE]  # which only a card takes
print(f"executed peak {ledger.peak_bytes:,} B, planned {tensors:,} B as the card's allocator rounds sizes")

# %% The profile as a table, for a spreadsheet or pandas.
with TemporaryDirectory() as folder:
    path = Path(folder, "memory.csv")
    profiler.write_csv(path)
    for row in csv.DictReader(path.read_text().splitlines()):
        print(row["step"], row["phase"], row["used_bytes"])
