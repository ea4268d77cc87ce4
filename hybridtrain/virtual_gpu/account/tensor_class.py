"""The purposes of storages on the card."""

from enum import StrEnum


class TensorClass(StrEnum):
    """The purpose of a storage on the card. The first five have a cell in the memory plan."""

    WEIGHT = "weight"
    """Parameters, as read by the forward pass."""
    MASTER = "master"
    """Higher-precision copy of the weights, which the optimizer updates; absent if weights are exact."""
    GRAD = "grad"
    """Gradients of parameters, from the backward pass until the update."""
    OPTIM_STATE = "optim_state"
    """First and second moments."""
    BOUNDARY = "boundary"
    """Block inputs kept between forward and backward."""
    ACTIVATION = "activation"
    """All other tensors of forward and backward pass: saved tensors, logits, activation gradients, token ids."""
    WORKSPACE = "workspace"
    """Scratch of libraries and kernels, and temporaries of the update."""
