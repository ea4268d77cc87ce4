"""A training file as an object: one error lists all faults."""

# %%
from pathlib import Path

from hybridtrain import compose, load_config
from hybridtrain.errors import ConfigError

file = load_config(Path(__file__).with_name("train-small.toml"))
plan = compose(file.optimizations)
print(f"{file.model.resolve().num_params / 1e6:.1f}M parameters, {file.num_steps} steps of {file.optimizer.kind}")

# %%
from tempfile import TemporaryDirectory

with TemporaryDirectory() as folder:
    broken = Path(folder, "broken.toml")
    broken.write_text('[model]\npreset = "gpt2-smal"\n[workload]\nbatch_size = 0\nseq_len = 64\n')
    try:
        load_config(broken)
    except ConfigError as error:
        print(error)
