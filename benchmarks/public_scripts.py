"""Public training scripts, unmodified, under ``hybridtrain virtual``: which are answered, and are the answers right?

``python benchmarks/public_scripts.py REPOSITORIES`` runs every script of public_scripts.toml; REPOSITORIES holds git
directories named ``owner+name/repo``, fetched apart. Records go to results/records/public-scripts.jsonl, one line a
try, and results/public-scripts.md is made of them. ``--only NAME`` runs the script of that name, or those whose name
holds NAME; ``--check`` runs the independent checks only, ``--page`` only makes the page.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridtrain.config.encode import encode
from hybridtrain.run.environment import read_environment

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "results" / "records" / "public-scripts.jsonl"
PAGE = HERE.parent / "results" / "public-scripts.md"
CARD, STEPS = "rtx-4090", 2
SECONDS, BYTES = 120, 4 * 2**30
"""Limits of a plan: seconds of the processor, resident memory."""
BAND = 0.25
"""How far a plan may be from the CPU's peak: kernels of the two devices take different scratch, and the CPU's peak
holds the batches that the loader made."""
_MISSING = ("No module named", "Name or service not known", "Failed to resolve")
"""What a script says where a package or the network is missing."""
_HEADER = """\
# Public training scripts

Made by `python benchmarks/public_scripts.py` from benchmarks/public_scripts.toml, where each script stands with its
commit and arguments, written down before it was run. {num} scripts of the {registered} registered were tried,
unmodified, {steps} steps each on the {card}. **Planned**: nothing is computed. Data and checkpoints are stand-ins.

{counts}

- right: answered, and the independent check agrees. wrong: answered, the check disagrees. unchecked: answered, nothing
  to check with. error: one clear sentence. crash: any other end. slow: more than {seconds} s of the processor, or
  {gib} GiB. not run: it fails on the CPU as well, its stand-in does, or a package or download is
  missing: our fault.
- first, last: outcomes of the first and of the last try. Failures stay.
- check: the script trained on the CPU for real. The number is the planned peak, without cuBLAS' workspace, over the
  CPU's peak by torch's profiler. It is right within {band:.0%}: the two devices take different scratch, and the CPU's
  peak holds the loader's batches. Or the number of parameters, by hand or as published.

| script | kind | first | last | allocated MiB | reserved MiB | processor s | check | cause |
|---|---|---|---|--:|--:|--:|---|---|
"""


def main() -> None:
    """Run what is asked for, write records and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repositories", type=Path, nargs="?", default=Path())
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument(
        "--keep-check", action="store_true", help="use the CPU's peak of an earlier try with the same arguments"
    )
    arguments = parser.parse_args()
    register = tomllib.loads(HERE.joinpath("public_scripts.toml").read_text(encoding="utf-8"))
    chosen = [script for script in register["scripts"] if script["name"] == arguments.only]
    chosen = chosen or [script for script in register["scripts"] if arguments.only in script["name"]]
    for script in [] if arguments.page else chosen:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            line = attempt(script, register["repositories"][script["repository"]], arguments, Path(folder))
        print(json.dumps(line), flush=True)
        if not arguments.check:
            with RECORDS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    PAGE.write_text(page(register["scripts"]), encoding="utf-8")


def attempt(script: Mapping[str, Any], commit: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Lay a script out with its data, plan it, check it; return the record."""
    line: dict[str, Any] = {
        "name": script["name"],
        "script_commit": commit,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    line["environment"] = encode(read_environment())
    source = arguments.repositories / script["repository"].replace("/", "+") / "repo"
    place, environment = lay_out(script, commit, source, folder)
    made = run_child([sys.executable, "-c", _prepared(script)], place, environment, 600)
    if made["code"]:
        return line | {"said": made["tail"]}
    copy = folder / "copy"
    known = (
        [try_ for try_ in tries().get(script["name"], []) if "cpu_peak_bytes" in try_] if arguments.keep_check else []
    )
    if known:
        line["cpu_peak_bytes"] = known[-1]["cpu_peak_bytes"]
    elif script.get("check", "").startswith(("cpu", "as cpu")):
        shutil.copytree(folder / "repo", copy, symlinks=True)
    if not arguments.check:
        line |= planned(script, place, environment)
    if copy.is_dir():
        there = copy / place.relative_to(folder / "repo")
        line |= checked(
            script, there, {name: value.replace(str(folder / "repo"), str(copy)) for name, value in environment.items()}
        )
    return line


def lay_out(script: Mapping[str, Any], commit: str, source: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """Check the script's files out; return the folder to run in and the environment."""
    path = Path(script["path"])
    take = script.get("take", str(path.parent)).split()
    (folder / "repo").mkdir()
    git = source / ".git" if (source / ".git").is_dir() else source
    packed = subprocess.run(["/usr/bin/git", "-C", str(git), "archive", commit, *take], check=True, capture_output=True)
    subprocess.run(["/usr/bin/tar", "x"], input=packed.stdout, cwd=folder / "repo", check=True)
    place = folder / "repo" / script.get("cwd", "" if "module" in script else path.parent)
    paths = [str(folder / "repo" / script["python_path"])] if "python_path" in script else []
    if "module" in script:
        paths.append(str(place))
    if "overlay" in script:
        paths.insert(0, str(Path(sys.prefix, script["overlay"].replace("==", "-"))))
    environment = dict(os.environ) | {
        "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([*paths, str(HERE.parent)]), "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1", "TORCH_HOME": str(folder / "torch"), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1",
        "COLUMNS": "200", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "agg",
    }  # fmt: skip
    if script.get("terminal"):
        (folder / "bin").mkdir()
        (folder / "bin" / "stty").write_text("#!/bin/sh\necho 40 200\n")
        (folder / "bin" / "stty").chmod(0o755)
        environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    return place, environment


def _prepared(script: Mapping[str, Any]) -> str:
    imports = "import json, pickle, sys\nfrom pathlib import Path\n"
    imports += f"sys.path.append({str(HERE)!r})\nfrom public_script_data import *\n"
    return imports + script.get("data", "")


def _command(script: Mapping[str, Any]) -> list[str]:
    started = ["-m", script["module"]] if "module" in script else [Path(script["path"]).name]
    return [*started, *shlex.split(script.get("args", ""))]


def planned(script: Mapping[str, Any], place: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run ``hybridtrain virtual``; return what it said."""
    options = ["virtual", "--card", CARD, "--steps", str(STEPS), "--json", "--"]
    command = [*shlex.split(script.get("launch", "")), *_command(script)]
    done = run_child([sys.executable, "-m", "hybridtrain", *options, *command], place, environment, SECONDS)
    line = {key: done[key] for key in ("code", "seconds", "wall", "rss")}
    answer = answer_of(done["out"])
    if answer is None or "peak_allocated_bytes" not in answer:
        is_clear = answer is not None and answer["error"] != "ScriptError"
        said = done["tail"] if answer is None else f"{answer['error']}: {answer['message']}"
        return line | {"said": said[-600:], "limit": done["limit"], "clear": is_clear}
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "params", "by_class", "verdict")
    basis = answer["basis"]
    notes = {
        name: basis[name]
        for name in ("lower_bound", "upper_bound", "refusals", "approximated", "uncounted", "growth")
        if basis[name]
    }
    return line | {name: answer[name] for name in kept} | {
        "cublas": answer["by_module"].get("cublas", 0), "num_steps": basis["num_steps"], "notes": notes
    }  # fmt: skip


def answer_of(out: str) -> dict[str, Any] | None:
    """Return the answer in what ``hybridtrain virtual --json`` printed; None without one."""
    for text in reversed(out.splitlines()):
        if text.startswith("{") and text.endswith("}"):
            try:
                return json.loads(text)
            except ValueError:
                continue
    try:
        return json.loads(out[out.index("{\n") :])
    except ValueError:
        return None


def checked(script: Mapping[str, Any], place: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run the script for real on the CPU; return its peak."""
    how, _, further = script["check"].partition("; params")[0].partition(":")
    out = place / "cpu-peak.json"
    options = {"as cpu": ["--as-cpu"], "cpu, plain": ["--plain"]}.get(how, [])
    command = [str(HERE / "cpu_peak.py"), str(STEPS), str(out), *options, *_command(script), *shlex.split(further)]
    done = run_child([sys.executable, *command], place, environment, SECONDS)
    return json.loads(out.read_text()) if out.is_file() else {"check_failed": done["tail"][-300:]}


def run_child(command: list[str], place: Path, environment: Mapping[str, str], seconds: int) -> dict[str, Any]:
    """Run a process, below ``seconds`` of the processor and ``BYTES`` of memory; return what it took and said."""
    begin, rss, limit = time.monotonic(), 0, ""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        while True:
            ended, status, used = os.wait4(child.pid, os.WNOHANG)
            if ended:
                break
            seen = _resident(child.pid)
            rss = max(rss, seen[0])
            if rss > BYTES or seen[1] > seconds or time.monotonic() - begin > 3 * seconds:
                limit = "memory" if rss > BYTES else "time"
                os.killpg(child.pid, signal.SIGKILL)
            time.sleep(0.2)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        said = out.read()
        tail = "\n".join(text for text in (said[-1500:] + "\n" + err.read()[-3000:]).splitlines() if text.strip())
    return {
        "code": child.returncode, "seconds": round(used.ru_utime + used.ru_stime, 1), "rss": used.ru_maxrss * 1024,
        "wall": round(time.monotonic() - begin, 1), "out": said, "limit": limit,
        "tail": tail.replace(f"{sys.prefix}/", "")[-1500:],
    }  # fmt: skip


def _resident(pid: int) -> tuple[int, float]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0, 0.0
    return int(fields[21]) * resource.getpagesize(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def outcome(script: Mapping[str, Any], line: Mapping[str, Any]) -> str:
    """Return the outcome of a record: its answer held against its check."""
    check, said = script.get("check", ""), line.get("said", "")
    if "peak_allocated_bytes" not in line:
        is_clear = line.get("clear", False) and "ScriptError" not in said
        if check == "no card" and is_clear:
            return "right"
        if line.get("limit"):
            return "slow"
        is_ours = "check_failed" in line or "code" not in line or any(text in said for text in _MISSING)
        return "error" if is_clear else "not run" if is_ours else "crash"
    found = ratio(line)
    if found is not None:
        return "right" if abs(found - 1) <= BAND else "wrong"
    value = check.partition("params = ")[2]
    if value:
        return "right" if line["params"] == int(value.replace("_", "")) else "wrong"
    return "unchecked"


def ratio(line: Mapping[str, Any]) -> float | None:
    """Return planned over measured peak, None without a check."""
    if "peak_allocated_bytes" not in line or not line.get("cpu_peak_bytes"):
        return None
    return (line["peak_allocated_bytes"] - line["cublas"]) / line["cpu_peak_bytes"]


def tries() -> dict[str, list[dict[str, Any]]]:
    """Return the records of each script."""
    found: dict[str, list[dict[str, Any]]] = {}
    if RECORDS.is_file():
        for text in RECORDS.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            found.setdefault(line["name"], []).append(line)
    return found


def page(scripts: list[Mapping[str, Any]]) -> str:
    """Return the page of all records."""
    known_tries = tries()
    rows = list(_rows(scripts, known_tries))
    known = [script for script in scripts if script["name"] in known_tries]
    counts = []
    for title, index in (("First", 0), ("Last", -1)):
        count = Counter(outcome(script, known_tries[script["name"]][index]) for script in known)
        counts.append(f"{title} try: " + ", ".join(f"{number} {name}" for name, number in count.most_common()) + ".")
    head = _HEADER.format(
        num=len(known),
        registered=len(scripts),
        steps=STEPS,
        card=CARD,
        counts=" ".join(counts),
        seconds=SECONDS,
        gib=BYTES >> 30,
        band=BAND,
    )
    return head + "\n".join(rows) + "\n"


def _rows(scripts: list[Mapping[str, Any]], known: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    for script in scripts:
        lines = known.get(script["name"])
        if not lines:
            continue
        first, last = lines[0], lines[-1]
        sizes = " | ".join(
            f"{last[key] / 2**20:.1f}" if key in last else "" for key in ("peak_allocated_bytes", "peak_reserved_bytes")
        )
        found = ratio(last)
        how = script.get("check", "")
        check = f"{found:.2f}" if found is not None else "params" if "params" in how else ""
        yield (
            f"| {script['name']} | {script['kind']} | {outcome(script, first)} | {outcome(script, last)} | {sizes} | "
            f"{last.get('seconds', '')} | {check} | {script.get('cause', '')} |"
        )


if __name__ == "__main__":
    main()
