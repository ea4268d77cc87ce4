"""Random states of a training run, as the state encoding takes them."""

import torch

from hybridkernels.state_encoding import GRAD_NORM_STEPS, LOSS_STEPS, NUM_MOMENT_STATISTICS, NUM_PHASES, NUM_SCALARS


def random_states(num_states: int) -> list[torch.Tensor]:
    """Return losses, gradient norms, moment statistics, scalars and phases of N states."""
    return [
        1.5 + torch.rand(num_states, LOSS_STEPS),
        0.5 + torch.rand(num_states, GRAD_NORM_STEPS),
        torch.rand(num_states, NUM_MOMENT_STATISTICS),
        torch.rand(num_states, NUM_SCALARS),
        torch.eye(NUM_PHASES)[torch.arange(num_states) % NUM_PHASES],
    ]
