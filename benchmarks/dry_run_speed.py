"""How long a dry run takes and how much memory it needs: each one in a fresh process, import included and without."""

import json
import subprocess
import sys

_RUN = """
import json, resource, sys, time
begin = time.perf_counter()
from pathlib import Path
from hybridtrain.planning.dry_runs import dry_run
from hybridtrain.models.model_config import Workload
from hybridtrain.models.model_config import model_preset
from hybridtrain.virtual_gpu.cards.card import find_card
from hybridtrain.stacks import default_folder
from hybridvalidation.scenario_files import ScenarioFiles
imported = time.perf_counter()
model, stack, seq_len = sys.argv[1], sys.argv[2], int(sys.argv[3])
plan = ScenarioFiles(default_folder()).stack(stack).plan()
workload = Workload(micro_batch_size=1, seq_len=seq_len)
found = dry_run(model_preset(model), plan, find_card("rtx-4090"), workload)
end = time.perf_counter()
print(json.dumps({
    "ops": len(found.trace.ops), "run_s": end - imported, "all_s": end - begin,
    "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
}))
"""
_CASES = (
    ("gpt2-1b", "vanilla", 1024, 3.0),
    ("gpt2-1b", "tight", 1024, 3.0),
    ("llama-7b", "vanilla", 2048, 6.0),
    ("llama-7b", "tight", 2048, 6.0),
    ("llama-50b", "vanilla", 2048, 20.0),
    ("llama-50b", "tight", 2048, 20.0),
)
"""Model, stack, sequence length, and the seconds that the dry run should stay below."""


def main() -> None:
    """Print a line per case; the second column counts from the process' first import."""
    print(f"{'model':10} {'stack':8} {'ops':>7} {'dry run s':>10} {'with imports s':>15} {'RSS MiB':>8} {'below s':>8}")
    for model, stack, seq_len, limit in _CASES:
        done = subprocess.run(
            [sys.executable, "-c", _RUN, model, stack, str(seq_len)], capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout)
        print(
            f"{model:10} {stack:8} {found['ops']:7} {found['run_s']:10.2f} {found['all_s']:15.2f} "
            f"{found['rss_mib']:8.0f} {limit:8.0f}"
        )


if __name__ == "__main__":
    main()
