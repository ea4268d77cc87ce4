"""The hint of a dry run that does not fit: arithmetic near enough to the plan to be worth saying."""

import pytest

from hybridtrain.dry_runs import dry_run
from hybridtrain.models.model_config import PRESETS, Workload
from hybridtrain.virtual_gpu.card import find_card
from hybridvalidation.runs.fit_arithmetic import bytes_of
from hybridvalidation.scenario_files import ScenarioFiles, default_folder


@pytest.mark.parametrize("stack", ["vanilla", "mixed", "checkpointing", "balanced", "chunked-loss"])
def test_the_arithmetic_is_near_the_plan(stack: str) -> None:
    plan = ScenarioFiles(default_folder()).stack(stack).plan()
    workload = Workload(micro_batch_size=2, seq_len=512)
    found = bytes_of(PRESETS["gpt2-small"], plan, workload)
    run = dry_run(PRESETS["gpt2-small"], plan, find_card("rtx-4090"), workload)
    assert found.card == pytest.approx(run.peak_reserved_bytes, rel=0.25)
    assert found.host == pytest.approx(run.host_peak_bytes, rel=0.25, abs=1e6)
    assert found.disk == run.disk_peak_bytes == 0
