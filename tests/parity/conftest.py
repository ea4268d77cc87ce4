"""On the host tiny parameters are worked on in slices too."""

import pytest

from hybridtrain.engine import parameter_pass


@pytest.fixture(autouse=True)
def short_slices_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut what the CPU updates into slices shorter than all others."""
    monkeypatch.setattr(parameter_pass, "HOST_SLICE_ELEMENTS", 768)
