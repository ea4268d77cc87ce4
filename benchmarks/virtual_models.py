"""Models of others at the sizes they were published in, on the virtual card: what they take, how long a plan takes.

``python benchmarks/virtual_models.py`` runs every model of virtual_models.toml beside it, each in a process of its own,
and writes results/models.md. ``--only NAME`` runs those whose name holds NAME and writes nothing. Needs transformers
and, for some models, diffusers.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu import TensorClass, VirtualGpu, find_card
from hybridtrain.virtual_gpu.account.ledger import holders
from hybridtrain.virtual_gpu.allocator.replay import replay_trace

HERE = Path(__file__).resolve().parent
CARD = find_card("rtx-4090")
BOUNDLESS = replace(CARD, memory_mib=4 * 2**20)
"""The same card with 4 TiB: what a step takes is said, whether it fits or not."""
NUM_STEPS = 2
VARIANTS = ("bf16", "bf16, recomputed", "autocast", "autocast, recomputed")
LIMITS = {"Llama 3.1 8B": (15.0, 2.0), "Llama 3.1 70B": (60.0, None)}
"""Seconds and GiB of the planning process that a plan should stay below."""
_HEADER = """\
# Models tried on the virtual card

Made by `python benchmarks/virtual_models.py` from benchmarks/virtual_models.toml, with {versions}. Each line is
**planned**: nothing was computed, downloaded or measured on a card. The models are those of transformers and diffusers,
unmodified, at the sizes they were published in; the program checks that each has exactly the published number of
parameters.

Two steps of full training, AdamW (fused), on an {card} with memory without limit; *fits* says
whether the same steps run in its {memory:.1f} GiB. Nothing is compiled.

- bf16: weights, gradients and moments in bfloat16. autocast: all of them in fp32, the forward pass under
  `torch.autocast`. recomputed: with the library's own gradient checkpointing.
- size: samples x tokens, or samples. T5 has as many tokens in the decoder as in the encoder. Pictures of SD 1.5
  and FLUX.1 are 512 x 512 (FLUX.1 with 512 tokens of text), of DiT 256 x 256, of ViT 224 x 224.
- allocated, reserved: the allocator's peaks, GiB. activations: the part of the allocated peak that is neither weight,
  gradient nor optimizer state.
- s, RAM: seconds of processor time from the model's construction to the report, on one thread (wall-clock time where
  nothing else runs), and the largest resident memory of the planning process so far, GiB; imports are not in seconds.
- Mixtures of experts run through grouped matmuls, whose memory does not depend on who goes to which expert; where code
  reads the choice, experts are loaded evenly (`placeholders.py`).
- Checked for every line: weights, gradients and moments on the card are parameters (and buffers) times bytes, to the
  byte; every trainable parameter has a gradient.
"""


def main() -> None:
    """Run all, or the models asked for; print lines as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run models whose name holds this, write nothing")
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = {
        model["name"]: model for model in tomllib.loads(HERE.joinpath("virtual_models.toml").read_text())["models"]
    }
    if arguments.child is not None:
        for variant in VARIANTS:
            print(json.dumps(attempt(models[arguments.child], variant)), flush=True)
        return
    rows = []
    for name, model in models.items():
        if arguments.only in name:
            rows += run(model)
            print("\n".join(map(line, rows[-len(VARIANTS) :])), flush=True)
            if not arguments.only:
                HERE.parent.joinpath("results", "models.md").write_text(page(rows), encoding="utf-8")


def run(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plan a model's variants in a fresh process; return their figures."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", model["name"]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(found) for found in done.stdout.splitlines()]


def attempt(model: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """Return what names a line of the table and its figures, or its error in the line's place."""
    facts = {"name": model["name"], "variant": variant, "size": " x ".join(map(str, model["batch"]))}
    try:
        return facts | plan(model, variant)
    except Exception as error:  # noqa: BLE001  whatever it is, the table says so
        return facts | {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def plan(model: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """Train the model on the virtual card; check the ledger against arithmetic; return figures.

    Raises:
        ValueError: The ledger's bytes of weights, gradients or moments are not what arithmetic says, a parameter has no
            gradient, or the model has another number of parameters than the published one.
    """
    module, kind = model["class"].split(".")
    library = import_module(module)
    built_with = getattr(library, kind)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    is_autocast = variant.startswith("autocast")
    dtype = torch.float32 if is_autocast else torch.bfloat16
    with VirtualGpu(BOUNDLESS) as gpu:
        network = build(built_with, library, model, dtype).to("cuda").train()
        if variant.endswith("recomputed"):
            recompute(network)
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        for step in range(NUM_STEPS):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_autocast):
                loss = loss_of(network, model, dtype)
            loss.backward()
            del loss
            optimizer.step()
            if step == NUM_STEPS - 1:
                check(network, gpu, model["params"])
            optimizer.zero_grad()
        found = gpu.report()
        end, end_cpu = time.perf_counter(), time.process_time()
    capped = replay_trace(found.trace, workspace_bytes=0, capacity_bytes=CARD.allocator_capacity_bytes)
    held = found.by_class()
    kept = sum(held[kind] for kind in (TensorClass.WEIGHT, TensorClass.GRAD, TensorClass.OPTIM_STATE))
    return {
        "params": model["params"], "allocated": found.peak.allocated_bytes, "reserved": found.peak_reserved_bytes,
        "activations": found.peak.allocated_bytes - kept, "fits": capped.oom is None,
        "wall_s": end - begin, "cpu_s": end_cpu - begin_cpu,
        "ram": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def build(kind: Any, library: Any, model: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Make the module as its library makes a new one."""
    if library.__name__ == "diffusers":
        return kind(**model["config"]).to(dtype)  # type: ignore[no-any-return]
    config = getattr(library, model["config_class"].split(".")[1]) if "config_class" in model else kind.config_class
    return kind._from_config(config(**model["config"]), dtype=dtype)  # type: ignore[no-any-return]


def recompute(network: Any) -> None:
    """Switch the library's checkpointing on, by the name that its version has for it."""
    for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable", "enable_gradient_checkpointing"):
        if hasattr(network, name):
            getattr(network, name)()
            return
    raise ValueError(f"{type(network).__name__}: has no checkpointing under a known name; see recompute().")


def loss_of(network: nn.Module, model: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Call the module with a batch as its users do; return the loss."""
    size = model["batch"]
    if "inputs" in model:
        return _denoise(network, model, dtype)
    if len(size) == 1:
        pictures = torch.randn(*size, 3, 224, 224).to("cuda", dtype)
        loss: Tensor = network(pixel_values=pictures, labels=torch.arange(*size).to("cuda")).loss
    else:
        ids = torch.randint(0, 1000, tuple(size)).to("cuda")
        loss = network(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _denoise(network: Any, model: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Predict the noise of latents at random times."""
    num = model["batch"][0]
    given = {name: torch.randn(num, *shape).to("cuda", dtype) for name, shape in model["inputs"].items()}
    noisy, at = given.pop("sample"), torch.randint(0, 1000, (num,)).to("cuda")
    name = type(network).__name__
    if name.startswith("DiT"):
        given["class_labels"] = torch.randint(0, 1000, (num,)).to("cuda")
    if name.startswith("Flux"):
        at = at.to(dtype) / 1000
        given |= {
            "guidance": torch.ones(num).to("cuda", dtype),
            "img_ids": torch.zeros(noisy.shape[1], 3).to("cuda", dtype),
            "txt_ids": torch.zeros(given["encoder_hidden_states"].shape[1], 3).to("cuda", dtype),
        }
    noise = network(noisy, timestep=at, **given).sample
    target = torch.randn(noise.shape).to("cuda", dtype)
    return nn.functional.mse_loss(noise.float(), target.float())


def check(network: nn.Module, gpu: VirtualGpu, published: int) -> None:
    """Hold what the ledger counts after an update against arithmetic, to the byte.

    Raises:
        ValueError: They differ.
    """
    parameters = list(network.parameters())
    num = sum(parameter.numel() for parameter in parameters)
    values = num * parameters[0].element_size()
    trace = gpu.ledger.trace()
    held = holders(trace, len(trace.events) - 1)[0]
    expected = {
        TensorClass.WEIGHT: values + sum(buffer.nbytes for buffer in network.buffers()),
        TensorClass.GRAD: values,
        TensorClass.OPTIM_STATE: 2 * values + 4 * len(parameters),  # the fused update counts steps on the card
    }
    faults = [f"{kind}: {held[kind]} bytes, not {size}" for kind, size in expected.items() if held[kind] != size]
    if num != published:
        faults.append(f"{num} parameters, not {published} as published")
    if gpu.without_gradient:
        faults.append(f"{len(gpu.without_gradient)} parameters got no gradient, as in {gpu.without_gradient[0]}")
    if faults:
        raise ValueError(f"{type(network).__name__}: {'; '.join(faults)}.")


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    first = f"| {row['name']} | "
    if "error" in row:
        return f"{first} | {row['size']} | {row['variant']} | {row['error']} | | | | | |"
    sizes = " | ".join(f"{to_gib(row[name]):.2f}" for name in ("allocated", "reserved", "activations"))
    end = f"{'yes' if row['fits'] else 'no'} | {row['cpu_s']:.1f} | {to_gib(row['ram']):.2f} |"
    return f"{first}{row['params']:,} | {row['size']} | {row['variant']} | {sizes} | {end}"


def page(rows: list[dict[str, Any]]) -> str:
    """Return the whole page."""
    versions = ", ".join(_versions())
    done = [row for row in rows if "error" not in row]
    lines = [
        _HEADER.format(versions=versions, card=CARD.name, memory=to_gib(CARD.allocator_capacity_bytes)),
        "## Speed\n",
        *_speed(done),
        "\n## Models\n",
        "| model | parameters | size | variant | allocated | reserved | activations | fits 24 GB | s | RAM |",
        "|---|--:|---|---|--:|--:|--:|---|--:|--:|",
        *map(line, rows),
    ]
    return "\n".join(lines) + "\n"


def _speed(rows: list[dict[str, Any]]) -> Iterator[str]:
    for name, (seconds, ram) in LIMITS.items():
        found = [row for row in rows if row["name"] == name]
        if not found:
            continue
        worst = {key: max(row[key] for row in found) for key in ("wall_s", "cpu_s", "ram")}
        is_met = worst["wall_s"] <= seconds and (ram is None or to_gib(worst["ram"]) <= ram)
        limit = f"{seconds:.0f} s" + (f" and {ram:.0f} GiB" if ram is not None else "")
        times = f"{worst['wall_s']:.1f} s ({worst['cpu_s']:.1f} s of the processor; the machine was shared)"
        outcome = "met" if is_met else "MISSED"
        yield (
            f"- {name}, two steps, the slowest variant: {times}, {to_gib(worst['ram']):.2f} GiB "
            f"(target {limit}: {outcome})"
        )


def _versions() -> Iterator[str]:
    for name in ("torch", "transformers", "diffusers"):
        try:
            yield f"{name} {version(name).partition('+')[0]}"
        except PackageNotFoundError:
            yield f"no {name}"


if __name__ == "__main__":
    main()
