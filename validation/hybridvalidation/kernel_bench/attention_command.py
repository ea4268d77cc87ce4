"""``hybridtrain bench attention``: what flash attention saves at growing lengths, planned in a second."""

import argparse
import json
import sys

from hybridtrain.config.encode import encode
from hybridvalidation.kernel_bench.attention_plan import append_attention, plan_attention, read_attention
from hybridvalidation.kernel_bench.attention_table import (
    SAVING,
    STATED_SAVING_PCT,
    attention_text,
    judge_attention,
    write_attention,
)
from hybridvalidation.records.environment import read_environment
from hybridvalidation.scenario_files import scenario_folder
from hybridvalidation.show.tables import TERMINAL


def attention_command(options: argparse.Namespace) -> int:
    """Plan, record and judge attention by length."""
    targets, records = scenario_folder(options.scenarios).targets(), options.results / "records"
    stated = targets[SAVING].value if SAVING in targets else None
    read_attention(records)  # a damaged file is told now, not after the run
    record = plan_attention(read_environment(), stated or STATED_SAVING_PCT)
    paths = [append_attention(records, record), *write_attention([record], targets, options.results)]
    if options.json:
        verdicts = [encode(verdict) for verdict in judge_attention(record, targets)]
        content = {"record": encode(record), "verdicts": verdicts, "files": [path.as_posix() for path in paths]}
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        written = ", ".join(path.as_posix() for path in paths)
        sys.stdout.write(f"{attention_text(record, targets, TERMINAL)}\n\nWritten: {written}\n")
    return 0
