"""Pictures of a scenario: memory at the peak, block by block and through a step, speed, and accuracy of a proxy."""

from collections.abc import Mapping, Sequence

from hybridtrain.planning.figures import MemoryFigures, Timeline
from hybridtrain.units import to_gib
from hybridtrain.virtual_gpu.account.tensor_class import TensorClass
from hybridvalidation.experiments.stack_runs import ScenarioRun
from hybridvalidation.judge.metrics import accuracy_retention
from hybridvalidation.pictures.picture import COLORS, PALE, Axis, Line, Picture, Series, View, intervals, rounded_gib
from hybridvalidation.scenario import BASELINE_STACK

CLASS_COLORS: Mapping[str, str] = {
    TensorClass.WEIGHT: "#0072b2", TensorClass.MASTER: "#56b4e9", TensorClass.OPTIM_STATE: "#009e73",
    TensorClass.GRAD: "#d55e00", TensorClass.BOUNDARY: "#f0e442", TensorClass.ACTIVATION: "#e69f00",
    TensorClass.WORKSPACE: "#cc79a7", "reserved, unused": "#dddddd", "CUDA context": "#7f7f7f", "other": "#8c6d31",
}  # fmt: skip
"""Holders of bytes: permanent ones first, then temporary ones."""
_CLASSES = tuple(TensorClass(name) for name in list(CLASS_COLORS)[: len(TensorClass)])
_LARGEST_SHARE = 1.5
"""Of what is there; bars are cut off above, lest they squeeze those that fit."""
_LEAST_SHOWN_GIB = 0.1
"""Less on the host is the batch on its way, and needs no bar."""
_MOST_POINTS = 1200
"""More than a screen has columns."""

Stacks = Sequence[tuple[str, MemoryFigures]]


def scenario_pictures(run: ScenarioRun) -> list[Picture]:
    """Return the pictures that show something; stacks that fit come first."""
    stacks = sorted(with_memory(run), key=lambda item: not item[1].fits)
    found = [make(run, stacks) for make in (_peak, _blocks, _timeline, _speed)] if stacks else []
    return [picture for picture in (*found, _accuracy(run)) if picture is not None]


def with_memory(run: ScenarioRun) -> list[tuple[str, MemoryFigures]]:
    """Return the stacks that have a dry run with figures."""
    return [(stack, memory) for stack in run.scenario.stacks if (memory := run.memory(stack)) is not None]


def _peak(run: ScenarioRun, stacks: Stacks) -> Picture:
    card, host = run.scenario.card.resolve(), run.rank_host
    on_card = [_on_card(memory, card.context_bytes) for _, memory in stacks]
    views = {"on the card": _bars(stacks, on_card, card.memory_bytes, card.name.removeprefix("NVIDIA GeForce "))}
    offloaded = [(stack, memory) for stack, memory in stacks if to_gib(memory.host_peak_bytes) >= _LEAST_SHOWN_GIB]
    if offloaded:
        limit = None if host.memory_gib is None else int(host.tensor_bytes)
        place = f"in host memory{' of a rank' if run.scenario.world > 1 else ''}"
        views[place] = _bars(offloaded, [_on_host(memory) for _, memory in offloaded], limit, "host memory for tensors")
    told = ". ".join(
        f"GiB {place}: " + ", ".join(f"{stack} {words}" for stack, (_, words) in view.labels.items())
        + "".join(f"; {line.text}" for line in view.lines)
        for place, view in views.items()
    )  # fmt: skip
    return Picture(
        name="peak", title="Where the memory goes at the peak", choice="memory", description=told, views=views,
        is_png=True,
        evidence="planned, by a dry run; stacks that do not fit are pale, long bars go on to the right",
    )  # fmt: skip


def _on_card(memory: MemoryFigures, context_bytes: int) -> dict[str, int]:
    held = {name.value: memory.by_class[name] for name in _CLASSES}
    return held | {
        "reserved, unused": memory.peak_reserved_bytes - sum(held.values()), "CUDA context": context_bytes,
    }  # fmt: skip


def _on_host(memory: MemoryFigures) -> dict[str, int]:
    held = {name.value: memory.host_by_class.get(name, 0) for name in _CLASSES}
    return held | {"other": memory.host_peak_bytes - sum(held.values())}


def _bars(stacks: Stacks, parts: Sequence[Mapping[str, int]], limit_bytes: int | None, limit: str) -> View:
    names = [stack for stack, _ in stacks]
    totals = [to_gib(sum(sizes.values())) for sizes in parts]
    card = [] if limit_bytes is None else [Line(at=to_gib(limit_bytes), text=f"{limit}: {to_gib(limit_bytes):.2f} GiB")]
    ceiling = float("inf") if limit_bytes is None else _LARGEST_SHARE * to_gib(limit_bytes)
    return View(
        series=[
            Series(
                name=part.replace("_", " "), x=[rounded_gib(sizes[part]) for sizes in parts], y=names, unit="GiB",
                color=CLASS_COLORS[part], opacity=[1.0 if memory.fits else PALE for _, memory in stacks],
            )
            for part in parts[0]
            if any(sizes[part] > 0 for sizes in parts)
        ],
        x=Axis(title="GiB", range=(0, ceiling) if max(totals) > ceiling else None), y=Axis(names=names),
        lines=card,
        labels={
            stack: (total, f"{total:.1f}{'' if memory.fits else ' (does not fit)'}")
            for (stack, memory), total in zip(stacks, totals, strict=True)
        },
    )  # fmt: skip


def _blocks(run: ScenarioRun, stacks: Stacks) -> Picture:
    units = {unit for _, memory in stacks for _, unit in map(_holder, memory.by_unit)}
    ordered = sorted(units, key=_place)
    views = {}
    for stack, memory in stacks:
        held = {_holder(key): size for key, size in memory.by_unit.items()}
        of_class = {name: [unit for unit in ordered if (name.value, unit) in held] for name in _CLASSES}
        views[stack] = View(
            series=[
                Series(
                    name=name.value.replace("_", " "), x=there, unit="GiB", digits=3, color=CLASS_COLORS[name],
                    y=[to_gib(held[name.value, unit]) for unit in there],
                )
                for name, there in of_class.items()
                if there
            ],
            x=Axis(names=ordered), y=Axis(title="GiB"),
        )  # fmt: skip
    return Picture(
        name="blocks", title="On the card at the peak, block by block",
        evidence="planned, by a dry run",
        description=f"{run.scenario.description}: who holds the bytes of the peak, from {ordered[0]} to {ordered[-1]}, "
        "one bar each, for the chosen stack.",
        views=views, choice="stack",
    )  # fmt: skip


def _holder(key: str) -> tuple[str, str]:
    """Return class and unit of one of a record's holders."""
    tensor_class, _, unit = key.partition("/")
    return tensor_class, unit or "whole step"


def _place(unit: str) -> tuple[int, int, str]:
    """Return the position of a unit in the model."""
    kind, _, number = unit.partition(".")
    order = ("embedding", "block", "head")
    return order.index(kind) if kind in order else len(order), int(number) if number.isdigit() else 0, unit


def _timeline(run: ScenarioRun, stacks: Stacks) -> Picture | None:
    card = run.scenario.card.resolve()
    views, told = {}, []
    for stack, memory in stacks:
        if memory.timeline is None:
            continue
        kept = thinned(memory.timeline, _MOST_POINTS)
        line = Line(at=to_gib(card.memory_bytes), axis="y", text=f"card: {to_gib(card.memory_bytes):.2f} GiB")
        views[stack] = View(
            series=[
                Series(
                    name=name.value.replace("_", " "), mark="area", unit="GiB", color=CLASS_COLORS[name],
                    x=[float(f"{memory.timeline.times_s[index]:.6g}") for index in kept],
                    y=[rounded_gib(memory.timeline.by_class[name][index]) for index in kept],
                )
                for name in _CLASSES
                if any(memory.timeline.sizes(name))
            ],
            x=Axis(title="seconds (estimated)", range=(0, memory.step_time_s)), y=Axis(title="GiB"),
            title=f"{stack}: {_which_step(memory)} ({memory.bound}-bound)", only_page=not memory.fits,
            lines=[line] if memory.peak_allocated_bytes > card.memory_bytes / 2 else [],
        )  # fmt: skip
        peak = max(memory.steps, key=lambda step: step.allocated_bytes)
        told.append(
            f"{stack}: {_which_step(memory)} of {memory.step_time_s:.2f} s, {memory.bound}-bound; most is held in step "
            f"{peak.step}, {peak.stage} {peak.unit}".rstrip()
        )
    if not views:
        return None
    return Picture(
        name="timeline", title="Memory through the last step", choice="stack", views=views, is_png=True,
        evidence="bytes planned, by a dry run; seconds estimated, by a roofline; of each slice of time its highest "
        "moment",
        description="GiB allocated on the card through a step by tensor class, for the chosen stack. "
        + ". ".join(told),
    )  # fmt: skip


def _which_step(memory: MemoryFigures) -> str:
    """Name the shown step: of a cycle its last, whose phases differ."""
    phases = {step.phase for step in memory.steps}
    return "one step" if len(phases) == 1 else f"the cycle's last step, in {memory.steps[-1].phase.upper()}"


def thinned(timeline: Timeline, most: int) -> list[int]:
    """Return the moments to show: all, or the highest of each interval, and the last."""
    count = len(timeline.times_s)
    if count <= most:
        return list(range(count))
    totals = [sum(sizes) for sizes in zip(*timeline.by_class.values(), strict=True)]
    runs = [range(part * count // (most - 1), (part + 1) * count // (most - 1)) for part in range(most - 1)]
    return sorted({*(max(run, key=totals.__getitem__) for run in runs), count - 1})


def _speed(_run: ScenarioRun, stacks: Stacks) -> Picture:
    ranked = sorted(stacks, key=lambda item: (not item[1].fits, -item[1].tokens_per_s))
    told = ", ".join(
        f"{stack} {memory.tokens_per_s:,.0f}{'' if memory.fits else ' (does not fit)'}" for stack, memory in ranked
    )
    groups = {"fits": (COLORS[0], True), "does not fit: the speed of a larger card": (COLORS[-1], False)}
    series = [
        Series(
            name=name, color=color, unit="tokens/s", digits=0, y=[stack for stack, _ in of_group],
            x=[memory.tokens_per_s for _, memory in of_group],
            notes=[f"{memory.bound}-bound" for _, memory in of_group],
        )
        for name, (color, fits) in groups.items()
        if (of_group := [(stack, memory) for stack, memory in ranked if memory.fits is fits])
    ]  # fmt: skip
    view = View(series=series, x=Axis(title="tokens/s (estimated)"), y=Axis(names=[stack for stack, _ in ranked]))
    return Picture(
        name="speed", title="Tokens per second", evidence="estimated, by a roofline",
        description=f"Tokens per second: {told}.", views={"": view},
    )  # fmt: skip


def _accuracy(run: ScenarioRun) -> Picture | None:
    kept = {stack: accuracy_retention(run, stack) for stack in run.scenario.stacks if stack != BASELINE_STACK}
    points = {stack: interval for stack, interval in kept.items() if interval is not None}
    record = run.get("accuracy", BASELINE_STACK)
    if not points or record is None or record.accuracy is None:
        return None
    proxy = f"a proxy of {record.accuracy.num_params / 1e6:.2f}M parameters with {len(record.accuracy.seeds)} seeds"
    told = ", ".join(f"{name} {kept.mean:.2f} % ({kept.low:.2f} to {kept.high:.2f})" for name, kept in points.items())
    series = intervals("top-1 kept", points, COLORS[0], unit="%", digits=2)
    view = View(
        series=[series], x=Axis(title=f"% of {BASELINE_STACK}'s top-1"), y=Axis(names=list(points)),
        lines=[Line(at=100, text=BASELINE_STACK)],
        labels={name: (kept.high, f"{kept.mean:.2f} %") for name, kept in points.items()},
    )  # fmt: skip
    return Picture(
        name="accuracy", title=f"Accuracy that a small proxy keeps of {BASELINE_STACK}'s", is_png=True,
        evidence=f"executed, by training {proxy} on the CPU; bars: 95 % interval over paired seeds",
        description=f"Top-1 accuracy in percent of {BASELINE_STACK}'s: {told}.", views={"": view},
    )  # fmt: skip
