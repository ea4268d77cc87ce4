"""Whether ``fit`` finds what a search of everything finds, and how long each takes.

``fit`` makes short runs of the best by arithmetic alone; the other search makes one of everything that fits by
arithmetic. Where their fastest options differ, both are run dry with every block, and the ratio is of those runs; the
ratios of single kinds of numbers (exact, lora) are of short runs.
"""

import argparse
import time
from collections.abc import Callable

from hybridtrain.models.model_config import PRESETS
from hybridtrain.planning.candidates import FitRequest
from hybridtrain.planning.fitting import TrainingOption, confirmed, fit
from hybridtrain.virtual_gpu.cards.card import Host, find_card
from hybridtrain.virtual_gpu.cards.links import World

_MODELS = ("gpt2-1b", "llama-7b", "qwen3-8b", "llama-50b")
_TOKENS_PER_STEP, _LONGEST = 131072, 2048


def main() -> None:
    """Print a line per model and host: both fastest options, the ratio of their speeds, processor seconds of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=_MODELS)
    parser.add_argument("--card", default="rtx-4090")
    parser.add_argument("--world", type=int, default=1, help="cards")
    parser.add_argument("--host-gib", type=float, nargs="+", default=[64.0, 128.0])
    given = parser.parse_args()
    for name in given.models:
        model = PRESETS[name]
        seq_len = min(_LONGEST, model.max_seq_len)
        for gib in given.host_gib:
            host = Host(memory_gib=gib)
            count, world = _TOKENS_PER_STEP // seq_len, World(size=given.world)
            print(_line(name, FitRequest(model, find_card(given.card), host, seq_len, count, world)), flush=True)


def _line(name: str, request: FitRequest) -> str:
    some, quick_s = _timed(lambda: fit(request))
    all_of_them, every_s = _timed(lambda: fit(request, is_exhaustive=True))
    quick, every = some[0], all_of_them[0]
    speeds = {option.name: option.tokens_per_s for option in some if option.fits}
    worst = min(
        ((speeds.get(option.name) or 0.0) / (option.tokens_per_s or 1.0) for option in all_of_them if option.fits),
        default=1.0,
    )
    head = f"{name}, {request.host.memory_gib:g} GiB: {_named(quick)}"
    seconds = f"of each kind of numbers at least {worst:.3f} of its tokens/s; {quick_s:.1f} s against {every_s:.1f} s"
    if not (quick.fits and every.fits):
        return f"{head}, fits {quick.fits} against {every.fits}; {seconds}"
    if _named(quick) == _named(every):
        return f"{head} in both; {seconds}"
    quick, every = confirmed(request, quick), confirmed(request, every)
    ratio = (quick.tokens_per_s or 0.0) / (every.tokens_per_s or 1.0)
    return f"{head}, of everything {_named(every)}; {ratio:.3f} of its tokens/s, both run whole; {seconds}"


def _named(option: TrainingOption) -> str:
    found = option.candidate
    return f"{option.name}, {found.arrangement.name}, {found.micro_batch_size} x {found.num_micro_batches}"


def _timed(search: Callable[[], tuple[TrainingOption, ...]]) -> tuple[tuple[TrainingOption, ...], float]:
    start = time.process_time()
    found = search()
    return found, time.process_time() - start


if __name__ == "__main__":
    main()
