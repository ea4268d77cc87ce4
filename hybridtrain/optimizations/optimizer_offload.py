"""Optimizer offload: master weights, moments and optionally gradients are on host or disk."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hybridtrain.config.rules import broken, refuse
from hybridtrain.plan.claim import Claim, setting_claims
from hybridtrain.plan.compose import Optimization
from hybridtrain.plan.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOffload(Optimization):
    """Stream the optimizer state through the device, or update it on the host."""

    kind: ClassVar[str] = "optimizer_offload"

    update_on: Literal["device", "host"] = "device"
    """device: state is streamed in slices, to the device and back. host: the CPU updates; gradients are copied to
    it."""
    tier: Literal["host", "disk"] = "host"
    """Tier of the state."""
    offload_grads: bool = True
    """Whether gradients are offloaded to host memory, as an update on the host needs."""

    def __post_init__(self) -> None:
        on_device = self.update_on == "device"
        needs = "needs update_on = 'device'; an update on the host"
        rules = {
            f"tier: disk {needs} works in host memory": on_device or self.tier == "host",
            f"offload_grads: false {needs} reads gradients in host memory": on_device or self.offload_grads,
        }
        refuse(broken(rules))

    def claims(self) -> Iterable[Claim]:
        """Return the claims on the place of everything the update reads and writes."""
        yield Claim("master.placement", Placement(self.tier))
        yield Claim("optim_state.placement", Placement(self.tier))
        yield from setting_claims(self)
        if self.offload_grads:
            yield Claim("grad.placement", Placement.HOST)
