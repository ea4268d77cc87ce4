"""A card's used memory, with a driver that is not there: which card, which source, and what is said without one."""

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtrain.profiler import nvml
from hybridtrain.profiler.nvml import (
    DeviceIdentity,
    DeviceMemory,
    DeviceReadError,
    NvidiaSmiReader,
    NvmlReader,
    identify_device,
    open_device_reader,
)

MIB, GIB = 2**20, 2**30
UUIDS = ("11111111-aaaa-bbbb-cccc-000000000000", "22222222-aaaa-bbbb-cccc-000000000000")
BUSES = ("00000000:3B:00.0", "00000000:AF:00.0")
SMI = f"""\
GPU-{UUIDS[0]}, {BUSES[0]}, 24564, 20000
GPU-{UUIDS[1]}, {BUSES[1]}, 24564, 24000
"""


class FakeNvml:
    """Two cards of 24 GiB; card n has 8 n + 1 GiB free. ``used`` is another figure than total - free, as in NVML 2."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, starts: bool = True, mig: str = "") -> None:
        self.starts, self.mig = starts, mig
        self.users = 0
        self.answers = True

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

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return self._find([0, 1], index)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if not self.answers:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(total=24 * GIB, free=(8 * handle + 1) * GIB, used=7)

    def _find(self, names: list[Any], name: Any) -> int:
        if name not in names:
            raise self.NVMLError("Not Found")
        return names.index(name)


def smi(output: str = SMI) -> nvml.RunCommand:
    def run(command: Sequence[str]) -> str:
        assert command[0] == "nvidia-smi"
        return output

    return run


def missing(_command: Sequence[str] = ()) -> str:
    raise FileNotFoundError("nvidia-smi")


def no_package() -> Any:
    raise ImportError("pynvml")


def never(_command: Sequence[str]) -> str:
    raise AssertionError("nvidia-smi must not be asked")


SECOND = [
    pytest.param(DeviceIdentity(uuid=UUIDS[1]), id="uuid"),
    pytest.param(DeviceIdentity(pci_bus_id=BUSES[1]), id="bus"),
    pytest.param(DeviceIdentity(uuid="not-known-to-this-driver", pci_bus_id=BUSES[1]), id="bus-after-uuid"),
    pytest.param(DeviceIdentity(uuid=UUIDS[1], pci_bus_id=BUSES[0]), id="uuid-before-bus"),
    pytest.param(DeviceIdentity(index=1), id="index"),
]


@pytest.mark.parametrize("identity", SECOND)
def test_nvml_reads_the_card_that_is_meant(identity: DeviceIdentity) -> None:
    reader = open_device_reader(identity, import_nvml=FakeNvml, run=never)
    assert reader.read() == DeviceMemory(used_bytes=15 * GIB, total_bytes=24 * GIB)


@pytest.mark.parametrize("identity", SECOND)
def test_nvidia_smi_reads_the_card_that_is_meant(identity: DeviceIdentity) -> None:
    reader = open_device_reader(identity, import_nvml=no_package, run=smi())
    assert reader.read() == DeviceMemory(used_bytes=564 * MIB, total_bytes=24564 * MIB)


def test_a_mig_instance_is_found_by_its_uuid() -> None:
    module = FakeNvml(mig="33333333")
    assert NvmlReader(DeviceIdentity(uuid="33333333"), module).read().used_bytes == 7 * GIB  # the third of its devices


def test_nvml_counts_its_users() -> None:
    module = FakeNvml()
    reader = NvmlReader(DeviceIdentity(), module)
    assert module.users == 1
    reader.close()
    assert module.users == 0
    with pytest.raises(DeviceReadError, match="NVML does not know the card MIG-x"):
        NvmlReader(DeviceIdentity(uuid="x"), module)
    assert module.users == 0


def test_a_card_that_is_lost_is_told() -> None:
    module = FakeNvml()
    reader = NvmlReader(DeviceIdentity(), module)
    module.answers = False
    with pytest.raises(DeviceReadError, match="GPU is lost"):
        reader.read()


def test_without_a_driver_nvidia_smi_is_asked() -> None:
    reader = open_device_reader(DeviceIdentity(), import_nvml=lambda: FakeNvml(starts=False), run=smi())
    assert isinstance(reader, NvidiaSmiReader)
    assert reader.read().used_bytes == 4564 * MIB


def test_without_either_one_sentence_says_what_to_install() -> None:
    with pytest.raises(DeviceReadError) as found:
        open_device_reader(DeviceIdentity(), import_nvml=no_package, run=missing)
    message = str(found.value)
    assert "pip install 'hybridtrain[cuda]'" in message
    assert "nvidia-smi is not on the PATH" in message
    assert "\n" not in message
    with pytest.raises(DeviceReadError, match=r"Driver Not Loaded.*install the NVIDIA driver"):
        open_device_reader(DeviceIdentity(), import_nvml=lambda: FakeNvml(starts=False), run=missing)


def test_the_package_is_imported_on_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    assert open_device_reader(DeviceIdentity(), run=never).read().total_bytes == 24 * GIB
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DeviceReadError, match="needs the package nvidia-ml-py"):
        open_device_reader(DeviceIdentity())


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", "does not list the card"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "does not list the card"),
        (f"GPU-{UUIDS[0]}, {BUSES[0]}, [N/A], [N/A]\n", r"gives no memory for card GPU-1.*\[N/A\]"),
    ],
)
def test_what_nvidia_smi_does_not_know_is_told(output: str, words: str) -> None:
    with pytest.raises(DeviceReadError, match=words):
        NvidiaSmiReader(DeviceIdentity(), smi(output)).read()


@pytest.mark.parametrize(
    "error", [subprocess.CalledProcessError(9, "nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10), OSError(13)]
)
def test_an_nvidia_smi_that_fails_is_told(error: Exception) -> None:
    def run(_command: Sequence[str]) -> str:
        raise error

    with pytest.raises(DeviceReadError, match="nvidia-smi fails"):
        NvidiaSmiReader(DeviceIdentity(), run).read()


class Properties:
    """What torch tells of a card."""

    uuid = UUIDS[1].upper()  # torch leaves the prefix out
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0xAF, 0


def test_torchs_properties_name_the_card_whatever_is_visible() -> None:
    found = identify_device(0, Properties(), {"CUDA_VISIBLE_DEVICES": "1"})
    assert found == DeviceIdentity(uuid=UUIDS[1], pci_bus_id=BUSES[1])


@pytest.mark.parametrize(
    ("visible", "index", "identity"),
    [
        (None, 1, DeviceIdentity(index=1)),
        ("1", 0, DeviceIdentity(index=1)),
        ("1, 0", 1, DeviceIdentity(index=0)),
        (f"GPU-{UUIDS[1]}", 0, DeviceIdentity(uuid=UUIDS[1])),
        (f"0,MIG-{UUIDS[0]}", 1, DeviceIdentity(uuid=UUIDS[0])),
    ],
)
def test_without_properties_the_visible_devices_name_the_card(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, identity: DeviceIdentity
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert identify_device(index, None, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == identity


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_real_card_has_the_memory_that_cuda_says() -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    found = open_device_reader(identify_device(torch.cuda.current_device())).read()
    assert abs(found.total_bytes - total_bytes) < 0.05 * total_bytes  # CUDA leaves the driver's reserve out
    assert abs(found.used_bytes - (total_bytes - free_bytes)) < 0.05 * total_bytes
