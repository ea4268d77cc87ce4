# ruff: noqa: INP001  collected by its path, as the tests are
"""The benchmark cases under pytest-benchmark: ``pytest kernels/benchmarks``, for its tables and comparisons.

The cases, providers and checks are those of ``hybridtrain bench kernels``, whose records are what counts: here the wall
clock is read, launches included, and nothing is recorded. Shapes depend on whether there is a CUDA card.
"""

import pytest
import torch

from hybridvalidation.kernel_bench.bench import call, judge, make_bounds
from hybridvalidation.kernel_bench.case import KernelCase, Provider
from hybridvalidation.kernel_bench.cases import plan_cases

pytest.importorskip("pytest_benchmark", reason="pip install pytest-benchmark")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAIRS = [
    pytest.param(case, provider, id=f"{case.name} {provider.name}".replace(" ", "-"))
    for case in plan_cases(DEVICE, only=(), modes=(), quick=True)
    for provider in case.providers
]


@pytest.mark.parametrize(("case", "provider"), PAIRS)
def test_kernel(case: KernelCase, provider: Provider, benchmark) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001  optional
    """Check a provider's result, then time it."""
    if provider.missing:
        pytest.skip(provider.missing)
    inputs = case.make_inputs(DEVICE)
    run = provider.setup(inputs)
    verdict = judge(call(case, run), make_bounds(case, inputs))
    assert not verdict.message
    benchmark.group = case.name

    def timed() -> None:
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(timed, rounds=20, warmup_rounds=2)
