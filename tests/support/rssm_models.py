"""Small recurrent state-space models, their inputs, and one tick written as its definition. Names: rssm_gru's."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from hybridkernels.rssm_gru.reference import RssmRollout, rssm_rollout_reference, unimix

MARGIN = 1e-4
"""Less than half of 0.01 / 32, the smallest probability of a class of 32; 100 times what rounding moves."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of a roll-out."""

    weights: dict[str, Tensor]
    hidden_EBH: Tensor
    classes_EBK: Tensor
    actions_SEBA: Tensor
    uniforms_SEBK: Tensor
    features_EBF: Tensor | None

    @property
    def arguments(self) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """All of them, in order."""
        return (
            self.weights, self.hidden_EBH, self.classes_EBK, self.actions_SEBA, self.uniforms_SEBK, self.features_EBF
        )  # fmt: skip

    def to(self, target: torch.dtype | torch.device | str) -> "Inputs":
        """Everything but the classes converted, the classes moved."""
        device = None if isinstance(target, torch.dtype) else target
        return Inputs(
            {name: weight.to(target) for name, weight in self.weights.items()}, self.hidden_EBH.to(target),
            self.classes_EBK.to(device), self.actions_SEBA.to(target), self.uniforms_SEBK.to(target),
            None if self.features_EBF is None else self.features_EBF.to(target),
        )  # fmt: skip


def random_inputs(
    *, members: int = 2, rows: int = 3, ticks: int = 2, hidden: int = 16, categoricals: int = 16, classes: int = 16,
    actions: int = 3, features: int = 7, width: int = 16, is_seen: bool = False, scale: float = 1.0,
) -> Inputs:  # fmt: skip
    """Return float32 inputs whose draws keep away from borders, so that rounding cannot change a class."""
    size = categoricals * classes
    layers = {
        "mix": (size, width), "action": (actions, width), "seen": (features, width), "gru_input": (width, 3 * hidden),
        "gru_hidden": (hidden, 3 * hidden), "prior": (hidden, size), "head_hidden": (hidden + size, width),
        "head": (width, 2),
    }  # fmt: skip
    weights = {}
    for name, (num_inputs, num_outputs) in layers.items():
        weights[f"{name}.weight"] = torch.randn(members, num_inputs, num_outputs) * scale * num_inputs**-0.5
        weights[f"{name}.bias"] = torch.randn(members, 1, num_outputs) * 0.3
    inputs = Inputs(
        weights, torch.randn(members, rows, hidden) * 0.5, torch.randint(0, classes, (members, rows, categoricals)),
        torch.randn(ticks, members, rows, actions), torch.rand(ticks, members, rows, categoricals),
        torch.randn(members, rows, features) if is_seen else None,
    )  # fmt: skip
    return away_from_borders(inputs)


def away_from_borders(inputs: Inputs) -> Inputs:
    """Move each uniform number into its class by ``MARGIN``."""
    exact = inputs.to(torch.float64)
    uniforms = exact.uniforms_SEBK.clone()
    hidden, classes = exact.hidden_EBH, exact.classes_EBK
    for tick in range(len(uniforms)):
        features = exact.features_EBF if tick == 0 else None
        one = slice(tick, tick + 1)
        found = rssm_rollout_reference(exact.weights, hidden, classes, exact.actions_SEBA[one], uniforms[one], features)
        hidden, classes = found.hidden_EBH, found.classes_EBK
        upper_EBKC = unimix(found.logits_EBZ.unflatten(-1, (classes.shape[-1], -1))).cumsum(-1)
        lower_EBKC = functional.pad(upper_EBKC[..., :-1], (1, 0))
        lower, upper = (border.gather(-1, classes[..., None])[..., 0] for border in (lower_EBKC, upper_EBKC))
        uniforms[tick] = uniforms[tick].clamp(lower + MARGIN, upper - MARGIN)
    return replace(inputs, uniforms_SEBK=uniforms.float())


def follow_definition(inputs: Inputs) -> RssmRollout:
    """Return the roll-out by dense one-hot products and torch's own GRU cell, member by member, row by row."""
    num_ticks, num_members, num_rows, _ = inputs.actions_SEBA.shape
    parts = [[_row(inputs, member, row) for row in range(num_rows)] for member in range(num_members)]
    stacked = [torch.stack([torch.stack([row[i] for row in rows]) for rows in parts]) for i in range(5)]
    assert stacked[0].shape == (num_members, num_rows, num_ticks)
    return RssmRollout(stacked[0].permute(2, 0, 1), stacked[1].permute(2, 0, 1), *stacked[2:])


def _row(inputs: Inputs, member: int, row: int) -> tuple[Tensor, ...]:
    matrices = {name: weight[member] for name, weight in inputs.weights.items()}

    def affine(x: Tensor, name: str) -> Tensor:
        return x @ matrices[f"{name}.weight"] + matrices[f"{name}.bias"][0]

    hidden, classes = inputs.hidden_EBH[member, row], inputs.classes_EBK[member, row]
    num_classes = matrices["mix.weight"].shape[0] // len(classes)
    means, log_variances, logits = [], [], hidden
    for tick in range(len(inputs.actions_SEBA)):
        sample = functional.one_hot(classes, num_classes).to(hidden.dtype).flatten()
        mixed = affine(sample, "mix") + affine(inputs.actions_SEBA[tick, member, row], "action")
        if tick == 0 and inputs.features_EBF is not None:
            mixed = mixed + affine(inputs.features_EBF[member, row], "seen")
        hidden = torch.gru_cell(
            functional.silu(mixed)[None], hidden[None], matrices["gru_input.weight"].t(),
            matrices["gru_hidden.weight"].t(), matrices["gru_input.bias"][0], matrices["gru_hidden.bias"][0],
        )[0]  # fmt: skip
        logits = affine(hidden, "prior")
        shares = 0.99 * logits.view(len(classes), num_classes).softmax(-1) + 0.01 / num_classes
        uniforms = inputs.uniforms_SEBK[tick, member, row]
        classes = torch.stack(
            [(share.cumsum(0) >= uniform).nonzero()[0, 0] for share, uniform in zip(shares, uniforms, strict=True)]
        )
        sample = functional.one_hot(classes, num_classes).to(hidden.dtype).flatten()
        mean, log_variance = affine(functional.silu(affine(torch.cat([hidden, sample]), "head_hidden")), "head")
        means.append(mean)
        log_variances.append(log_variance)
    return torch.stack(means), torch.stack(log_variances), hidden, classes, logits
