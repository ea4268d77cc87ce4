"""Does it fit, and how fast would it be? A step of a 1.1B model on a virtual card."""

# %% A stack is a list of declarations; their order does not matter.
from hybridtrain import Workload, compose, dry_run, find_card, model_preset
from hybridtrain.optimizations import GradientCheckpointing, Int8Optimizer, MixedPrecision

stack = [MixedPrecision(master="split16"), Int8Optimizer(), GradientCheckpointing(recompute_every=1)]
plan = compose(stack)

# %% The real trainer runs on meta tensors; every byte is counted.
run = dry_run(model_preset("gpt2-1b"), plan, find_card("rtx-4090"), Workload(micro_batch_size=1, seq_len=256))
print(f"fits: {run.fits}, {run.device_used_bytes / 2**30:.2f} GiB of the card (planned)")
print(f"{run.time.seconds:.3f} s a step, {run.tokens_per_s:,.0f} tokens/s, {run.bound} binds (estimated)")

# %% Who holds the peak?
for tensor_class, size in sorted(run.by_class().items(), key=lambda held: -held[1]):
    print(f"{tensor_class:12} {size / 2**30:6.2f} GiB")

# %% A plan that could not run cannot be made.
from hybridtrain.errors import PlanConflictError
from hybridtrain.optimizations import ActivationOffload

try:
    compose([ActivationOffload()])
except PlanConflictError as error:
    print(error)
