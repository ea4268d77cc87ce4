"""Which arm a stack shares: both train a few steps alike, and every loss and weight is compared to the bit."""

from collections.abc import Iterable

from hybridtrain.data.pinned_corpus import pinned_corpus
from hybridtrain.stacks import Stack
from hybridvalidation.study.ladder.protocol import LadderFile, Probe
from hybridvalidation.study.ladder.run import TEXT, recipe_of, run_probe


def arms_of_stacks(ladder: LadderFile, stacks: Iterable[Stack]) -> dict[str, str | None]:
    """Return by stack the name of the arm that computes the same; None: no arm does.

    The first rung's model, batch and learning rate are taken, every phase is passed through. Fine-tuned arms are
    compared without their base, from random weights: the arithmetic is the same.
    """
    rung, corpus = ladder.rungs[0], pinned_corpus(TEXT)
    lr, seed = rung.lrs[0], ladder.tuning_seed
    arms: dict[Probe, str] = {}
    for arm in ladder.arms:
        recipe = recipe_of(ladder, arm.plan(), arm.optimizer, lr, to_nearest=arm.rounds_to_nearest)
        arms.setdefault(run_probe(rung, recipe, seed, corpus), arm.name)
    return {
        stack.name: arms.get(run_probe(rung, recipe_of(ladder, stack.plan(), stack.optimizer, lr), seed, corpus))
        for stack in stacks
    }
