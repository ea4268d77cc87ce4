"""A card's used memory, with a driver that is not there: which card is read, and what is said without one."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.profiler.nvml import DeviceMemory, DeviceReader, DeviceReadError

GIB = 2**30
UUIDS = ("11111111-aaaa-bbbb-cccc-000000000000", "22222222-aaaa-bbbb-cccc-000000000000")
BUSES = ("00000000:3B:00.0", "00000000:AF:00.0")


class FakeNvml:
    """Two cards of 24 GiB; card n has 8 n + 1 GiB free. ``used`` is another figure than total - free, as in NVML 2."""

    class NVMLError(Exception):
        pass

    starts = answers = True
    mig = "none"
    users = 0

    def nvmlInit(self) -> None:
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self._find([f"GPU-{one}" for one in UUIDS] + [f"MIG-{self.mig}"], uuid)

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> int:
        return self._find(list(BUSES), bus)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if not self.answers:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(total=24 * GIB, free=(8 * handle + 1) * GIB, used=7)

    def _find(self, names: list[Any], name: Any) -> int:
        if name not in names:
            raise self.NVMLError("Not Found")
        return names.index(name)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Let there be a driver; torch sees its second card as the first."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    show_card(monkeypatch, UUIDS[1].upper(), 0xAF)  # torch leaves the prefix out
    return fake


def show_card(monkeypatch: pytest.MonkeyPatch, uuid: str, bus: int) -> None:
    properties = SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: properties}.__getitem__)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("uuid", "bus"), [(UUIDS[1], 0x3B), ("unknown-to-this-driver", 0xAF)], ids=["uuid-before-bus", "bus-after-uuid"]
)
def test_the_card_that_torch_shows_is_read(monkeypatch: pytest.MonkeyPatch, uuid: str, bus: int) -> None:
    show_card(monkeypatch, uuid, bus)
    assert DeviceReader(0).read() == DeviceMemory(used_bytes=15 * GIB, total_bytes=24 * GIB)


def test_a_mig_instance_is_found_by_its_uuid(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.mig = "33333333"
    show_card(monkeypatch, "33333333", 0x3B)
    assert DeviceReader(0).read().used_bytes == 7 * GIB  # the third of its devices


def test_nvml_counts_its_users(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DeviceReader(0)
    assert driver.users == 1
    reader.close()
    assert driver.users == 0
    show_card(monkeypatch, "x", 1)
    with pytest.raises(DeviceReadError, match=r"NVML does not know the card 00000000:01:00\.0"):
        DeviceReader(0)
    assert driver.users == 0


def test_a_virtual_card_is_not_taken_for_a_real_one(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(name="virtual"))
    with pytest.raises(DeviceReadError, match="torch's device is not a physical card, so NVML cannot"):
        DeviceReader(0)
    assert driver.users == 0


def test_a_card_that_is_lost_is_told(driver: FakeNvml) -> None:
    reader = DeviceReader(0)
    driver.answers = False
    with pytest.raises(DeviceReadError, match="GPU is lost"):
        reader.read()


def test_what_is_missing_is_told_with_what_to_install(driver: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.starts = False
    with pytest.raises(DeviceReadError, match=r"Driver Not Loaded.*install the NVIDIA driver"):
        DeviceReader(0)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceReadError, match=r"install the package nvidia-ml-py.*pip install 'hybridtrain\[cuda"):
        DeviceReader(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_real_card_has_the_memory_that_cuda_says() -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    found = DeviceReader(torch.cuda.current_device()).read()
    assert abs(found.total_bytes - total_bytes) < 0.05 * total_bytes  # CUDA leaves the driver's reserve out
    assert abs(found.used_bytes - (total_bytes - free_bytes)) < 0.05 * total_bytes
