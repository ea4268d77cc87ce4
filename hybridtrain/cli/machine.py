"""Verbs about names, this machine and logs."""

from pathlib import Path
from typing import Annotated, get_args

from cyclopts import Parameter

from hybridtrain.cli.shared import COMMON, RECORDED, Answer, Common, Kind, Recorded, described, known_names
from hybridtrain.extension import extensions


def list_names(kind: Kind | None = None, /, *, common: Recorded = RECORDED) -> Answer:
    """List scenarios, stacks, optimizations, optimizers, models, cards and targets.

    Targets come with their verdicts, from the records of --results; where there are none, from those that came with
    hybridtrain.

    Example: hybridtrain list targets

    Args:
        kind: One kind of names; default: all but optimizers, who take torch's time to be asked.
    """
    for extension in extensions():
        if kind is not None and kind in extension.listings:
            answer: Answer = extension.listings[kind](common)
            return answer
    kinds = [kind] if kind else [other for other in get_args(Kind) if other != "optimizers"]
    names = {name: known_names(name, common.scenarios) for name in kinds}
    if kind == "cards":
        from hybridtrain.reports.card_table import card_table

        return Answer(text=card_table(), content=names)
    if kind is not None:
        about = described(kind)
        return Answer(text="\n".join(f"{n}: {about[n]}" if n in about else n for n in names[kind]), content=names)
    text = "\n".join(f"{title}:\n  " + "\n  ".join(found) for title, found in names.items())
    return Answer(text=text, content=names)


def _page_names(_context: object) -> list[str]:
    from hybridtrain.reports.guide_pages import guide_pages

    return list(guide_pages())


def guide(
    page: Annotated[str | None, Parameter(completer=_page_names)] = None,
    /,
    *,
    common: Common = COMMON,  # noqa: ARG001
) -> Answer:
    """Print a page of the guide, or list the pages.

    Example: hybridtrain guide gate

    Args:
        page: Name of a page, as gate or techniques/lora; default: list all of them.
    """
    from hybridtrain.reports.guide_pages import find_page, first_sentence, guide_pages, list_text, plain_text

    pages = guide_pages()
    if page is None:
        told = {name: first_sentence(path.read_text(encoding="utf-8")) for name, path in pages.items()}
        return Answer(text=list_text(pages), content={"pages": told})
    name = find_page(page, pages)
    markdown = pages[name].read_text(encoding="utf-8")
    return Answer(text=plain_text(markdown), content={"page": name, "markdown": markdown})


def doctor(*, log: Annotated[Path | None, Parameter(name="--from")] = None, common: Common = COMMON) -> Answer:
    """Check this machine, or diagnose a log: what went wrong, why, and what to do.

    Exit code 1 when something installed does not work, or a log holds an unknown error, or neither a known trouble nor
    any figures.

    Example: hybridtrain doctor --from run/log.jsonl

    Args:
        log: Output of a run, ours or not: a traceback, losses, speeds; or the folder of a run (--out of train).
    """
    if log is not None:
        return _diagnose(log)
    import os
    import shutil

    import torch

    from hybridkernels.adamw_int8.cpu_build import KernelBuildError, load_cpu_kernel
    from hybridkernels.triton_launch import cuda_backend
    from hybridtrain.config.encode import encode
    from hybridtrain.run.environment import package_version, read_environment
    from hybridtrain.stacks import stack_folder
    from hybridtrain.units import to_gib

    environment = read_environment()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    broken = ""
    try:
        load_cpu_kernel()
    except KernelBuildError as error:
        broken = f"does not work: {error}"
    checks = {
        "CUDA card": environment.gpu or "none: memory is planned, speed is estimated, accuracy is executed on the CPU",
        "bitsandbytes": package_version("bitsandbytes") or "missing: 8-bit updates on CUDA run as a Triton kernel",
        "8-bit update on the CPU": broken
        or {
            "compiled": "compiled with this machine's C compiler",
            "reference": "no C compiler found: plain torch, about 100 times slower (install gcc)",
        }[environment.int8_update],
        "Memory": f"{to_gib(memory):.1f} GiB, {environment.num_cpus} processors",
        "Free disk here": f"{to_gib(shutil.disk_usage('.').free):.1f} GiB",
        "Scenario files": str(stack_folder(common.scenarios).folder),
    }
    if torch.cuda.is_available():
        runs = cuda_backend() == "triton"
        checks["Triton"] = "runs on this card" if runs else "cannot run here: kernels are torch's own ops, slower"
    told = [f"{name}: {value}" for name, value in checks.items()]
    told.append(f"python {environment.python}, torch {environment.torch}, {environment.system}, {environment.cpu}")
    content = {"environment": encode(environment), "checks": checks}
    return Answer(text="\n".join(told), content=content, code=1 if broken else 0)


def _diagnose(log: Path) -> Answer:
    from hybridtrain.diagnoses import counted, diagnose, diagnosis_text, read_log, unknown_error

    text = read_log(log)
    found, read = diagnose(text), counted(text)
    error = unknown_error(text, found)
    content = {
        "log": log.as_posix(), "losses": read[0], "speeds": read[1],
        "troubles": [answer.as_mapping() for answer in found], "unknown_error": error or None,
    }  # fmt: skip
    code = 0 if found or (any(read) and not error) else 1
    return Answer(text=diagnosis_text(found, log, read, error), content=content, code=code)
