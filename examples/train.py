"""Train for real, with the plan that was dry-run: a tiny model on the CPU, and the same line for a card."""

# %%
import torch

from hybridtrain import DirectTransfer, ModelConfig, Trainer, TrainerConfig, compose
from hybridtrain.data.batches import BatchSampler
from hybridtrain.data.corpus import embedded_corpus
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optimizations import GradAccumulation, WeightStreaming
from hybridtrain.trainer_config import LrSchedule

model = ModelConfig(
    family="gpt2", vocab_size=256, max_seq_len=64, num_blocks=3, width=32, num_heads=2, num_kv_heads=2, ffn_width=64
)

# %% Weights wait on the host and come to the device block by block; Lion updates them.
plan = compose([WeightStreaming(), GradAccumulation(grad_accum_steps=2, schedule="vertical")])
config = TrainerConfig(optimizer=OPTIMIZERS["lion"](lr=1e-3), schedule=LrSchedule(warmup_steps=2, total_steps=10))
trainer = Trainer(model, plan, config, DirectTransfer(torch.device("cpu")))

# %% Each step takes one batch per micro-batch.
sampler = BatchSampler(embedded_corpus(1 << 20).train, micro_batch_size=4, seq_len=64, seed=0)
for step in range(3):
    done = trainer.step([sampler.batch(step, part) for part in range(2)])
    print(f"step {done.step}: loss {done.loss:.3f}, gradient norm {done.grad_norm:.2f}")
