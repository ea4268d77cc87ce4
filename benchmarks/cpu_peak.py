"""Run a script for real on the CPU and measure its memory: ``cpu_peak.py STEPS OUT [--as-cpu | --plain] SCRIPT ARGS``.

An independent check of a plan: torch's own profiler counts what the CPU's allocator gives and takes. The script ends
when an optimizer begins its step number STEPS + 1. OUT gets peak bytes, and the bytes of parameters, gradients and
optimizer state found in the optimizers' own tables. ``--as-cpu``: ``.cuda()``, ``.to()`` of a card and the accelerator
mean the CPU. ``--plain``: without oneDNN, whose recurrent layers keep what no other implementation keeps.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Done(BaseException):
    """Enough steps."""


def _on_cpu(value: Any) -> Any:
    is_card = type(value) is int or (isinstance(value, str | torch.device) and str(value).startswith("cuda"))
    return "cpu" if is_card else value


def _stays(true_to: Any) -> Any:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return true_to(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    return to


def main() -> None:
    """Run, measure, write."""
    num_steps, out, *command = sys.argv[1:]
    option = command.pop(0) if command[0].startswith("--") else ""
    if option == "--as-cpu":
        torch.accelerator.is_available = lambda: True
        torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")  # type: ignore[assignment]
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
        for kind in (torch.Tensor, torch.nn.Module):
            kind.to = _stays(kind.to)  # type: ignore[method-assign,assignment]
    torch.backends.mkldnn.set_flags(option != "--plain")
    counts: dict[int, int] = {}
    held: dict[str, int] = {}
    sizes: dict[int, dict[str, int]] = {}

    def begin(optimizer: Any, *_: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if counts[id(optimizer)] > int(num_steps):
            raise Done

    def end(optimizer: Any, *_: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        state = [
            value for entry in optimizer.state.values() for value in entry.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]  # fmt: skip
        grads = [weight.grad for weight in weights if weight.grad is not None]
        parts = {"trained": weights, "grad": grads, "optim_state": state}
        sizes[id(optimizer)] = {name: sum(part.nbytes for part in of) for name, of in parts.items()}

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    sys.path[0] = "" if is_module else str(Path(command[0]).resolve().parent)
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        try:
            if is_module:
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(command[0], run_name="__main__")
        except (Done, SystemExit) as ended:
            print("ended:", type(ended).__name__, ended, file=sys.stderr)
    live = peak = 0
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    for part in ("trained", "grad", "optim_state"):
        held[part] = sum(size[part] for size in sizes.values())
    Path(out).write_text(json.dumps({"cpu_peak_bytes": peak, "steps": max(counts.values(), default=0)} | held))


if __name__ == "__main__":
    main()
