"""Sessions: tests, lint, docs, types, gate, records, report, validate, and one named session per scenario.

``nox --no-venv`` runs any of them in the environment that is active, where its packages are installed too.
"""

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "lint", "docs", "types", "gate"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
SPREAD = ("--numprocesses", "auto", "--dist", "loadfile")
"""A file goes to one process: what its tests share is made once."""
KERNEL_ENV = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
PEERS = {
    "litgpt": ["tests/peers/test_litgpt.py"],
    "trl": [
        "tests/peers/test_trl.py",
        "tests/peers/test_moves.py",
        "tests/peers/test_engines.py",
        "tests/peers/test_peft.py",
        "tests/peers/test_nf4.py",
    ],
}
SCENARIOS = sorted(path.stem for path in Path("scenarios").glob("*.toml") if path.stem != "targets")
ONE_CARD = [name for name in SCENARIOS if "world" not in nox.project.load_toml(f"scenarios/{name}.toml")]


def install(session: nox.Session, *groups: str) -> None:
    """Install the project as it is here, with dependency groups, pinned by constraints.txt."""
    packages = nox.project.dependency_groups(PYPROJECT, *groups)
    install_all(session, "--constraint", "constraints.txt", "--editable", ".", *packages)


def install_all(session: nox.Session, *packages: str) -> None:
    """Install packages into the session's environment; with ``nox --no-venv`` into the one that nox runs in."""
    if session.virtualenv.venv_backend == "none":
        session.run("python", "-m", "pip", "install", "--quiet", *packages, silent=True)
    else:
        session.install(*packages)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite."""
    install(session, "test")
    # One thread: tiny ops gain nothing from a second, and lose much where another process has its core.
    arguments = session.posargs or SPREAD
    session.run("pytest", *arguments, env={"OMP_NUM_THREADS": "1"})
    if not session.posargs:
        tests_kernels(session)


@nox.session(name="tests-kernels", default=False)
def tests_kernels(session: nox.Session) -> None:
    """Run Triton's kernels in its interpreter, against torch; the session tests includes it."""
    install(session, "test")
    # Set before triton is imported: a kernel is interpreted or compiled from its definition on.
    session.run("pytest", *(session.posargs or ["tests/hybridkernels", *SPREAD]), env=KERNEL_ENV)


@nox.session(name="tests-peers", default=False)
@nox.parametrize("peer", list(PEERS), ids=list(PEERS))
def tests_peers(session: nox.Session, peer: str) -> None:
    """Run other projects' scripts and trainers on the virtual card; each peer has its own environment."""
    install(session, f"peers-{peer}")
    session.run("pytest", *(session.posargs or [*PEERS[peer], *SPREAD]), env={"OMP_NUM_THREADS": "1"})


@nox.session(name="tests-browser", default=False)
def tests_browser(session: nox.Session) -> None:
    """Open the whole HTML report in a headless Chromium of this machine (apt-get install chromium)."""
    if not any(map(shutil.which, ("chromium", "chromium-browser"))):
        session.error("no Chromium on this machine, nothing was tested; apt-get install chromium")
    install(session, "browser")
    page = "tests/hybridvalidation/show/test_web_browser.py"
    session.run("hybridtrain", "report", "--html", "build/report", env={"OMP_NUM_THREADS": "1"})
    # Made once; its pages are tried on every core.
    arguments = session.posargs or [page, "--numprocesses", "auto"]
    session.run("pytest", *arguments, env={"OMP_NUM_THREADS": "1", "HYBRIDTRAIN_REPORT": "build/report"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and the direction of imports; files are read, so nothing they need is installed."""
    install_all(session, *nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": ".:kernels:validation"})


@nox.session
def docs(session: nox.Session) -> None:
    """Check what is generated in pages and tables; build the guide into build/site, with the HTML report in report/."""
    install(session, "docs")
    session.run("hybridtrain", "report", "--check", env={"OMP_NUM_THREADS": "1"})
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"OMP_NUM_THREADS": "1"})
    session.run("hybridtrain", "report", "--html", "build/site/report")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, "types")
    session.run("mypy")


@nox.session
def gate(session: nox.Session) -> None:
    """Replan every stack on one card and compare it with its record; compile kernels for one card and compare them too.

    By name: nox -s gate -- 13b-2x24gb (several cards), recorded, peers (others' trainers), kernels (for every card).
    """
    install(session, "kernels")
    session.run("hybridtrain", "gate", *(session.posargs or [*ONE_CARD, "kernels/sm_89"]))


@nox.session(default=False)
def records(session: nox.Session) -> None:
    """Check whether planned records hold, and list other records: nox -s records -- [NAME] [--verify]."""
    install(session)
    session.run("hybridtrain", "records", *session.posargs)


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Rebuild tables and plots from committed records."""
    session.install("--constraint", "constraints.txt", "--editable", ".")
    session.run("hybridtrain", "report", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Print dry-run times, CPU training throughput against transformers, and pytest-benchmark's tables of kernels.

    nox -s bench -- --quick: the tables of 8-bit kernels alone, in seconds.
    """
    install(session, "test", "bench")
    if session.posargs == ["--quick"]:
        session.run("pytest", "kernels/benchmarks", "-k", "int8")
        return
    session.run("python", "benchmarks/dry_run_speed.py", *session.posargs)
    session.run("python", "benchmarks/cpu_throughput.py", *session.posargs)
    session.run("pytest", "kernels/benchmarks")


@nox.session(name="bench-kernels", default=False)
def bench_kernels(session: nox.Session) -> None:
    """Time the kernels on this machine's card, or small shapes on the CPU: nox -s bench-kernels -- [--only OP,OP]."""
    if shutil.which("nvidia-smi"):
        session.install("--constraint", "constraints.txt", "--editable", ".[cuda]")
    else:
        install(session, "kernels")
    session.run("hybridtrain", "bench", "kernels", *session.posargs)


@nox.session(default=False)
def validate(session: nox.Session) -> None:
    """Run any scenario: nox -s validate -- NAME [--fresh] [--record]."""
    install(session)
    session.run("hybridtrain", "validate", *session.posargs)


@nox.session(default=False)
def study(session: nox.Session) -> None:
    """Compare ways to train, time to loss, resumable: nox -s study -- NAME [--jobs N]."""
    install(session)
    session.run("hybridtrain", "study", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """Inject faults by the thousand, for hours: nox -s faults -- [NAME ...] [--count N] [--seed N]."""
    install(session, "test")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "tests/support"}
    session.run("python", "-m", "faults", *session.posargs, env=environment)


@nox.session(default=False)
def evidence(session: nox.Session) -> None:
    """Measure on this machine's CUDA card: nox -s evidence -- [--minutes 12] [--only PART,PART]."""
    session.install("--constraint", "constraints.txt", "--editable", ".[cuda,peers]")
    session.run("hybridtrain", "evidence", *session.posargs)


def _named_session(scenario: str) -> None:
    def run(session: nox.Session) -> None:
        install(session)
        session.run("hybridtrain", "validate", scenario, *session.posargs)

    run.__doc__ = f"Run the scenario {scenario} under all its stacks and judge its targets."
    nox.session(run, name=f"validate-{scenario}", default=False)


for _scenario in SCENARIOS:
    _named_session(_scenario)
