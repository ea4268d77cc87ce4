"""Why a recommended stack has each of its settings, in a sentence each; bytes by arithmetic."""

from collections.abc import Iterator

from hybridtrain.planning.candidates import LEVELS, Numerics
from hybridtrain.planning.recommendation import Recommendation
from hybridtrain.units import format_bytes


def reasons(answer: Recommendation) -> dict[str, str]:
    """Return a sentence by the name of what it is about."""
    return dict(_reasons(answer))


def _reasons(answer: Recommendation) -> Iterator[tuple[str, str]]:
    chosen, params = answer.chosen, answer.request.model.num_params
    yield "precision", _precision(answer)
    tokens = chosen.micro_batch_size * answer.request.seq_len
    count = chosen.num_micro_batches
    if count == 1:
        yield "accumulation", f"none: one micro-batch of {tokens:,} tokens is the whole step, and it fits"
    else:
        why = (
            f"{count} micro-batches of {chosen.micro_batch_size} sequences, the fastest size tried that fits; the step "
            "has the tokens that were asked for, so gradients are their mean and scale_lr stays off"
        )
        yield "accumulation", why
    yield "checkpointing", _checkpointing(answer)
    yield "offload", _offload(answer)
    waiting = format_bytes(chosen.level.state_bytes * params)
    if chosen.arrangement.offloads_state:
        yield "predict_memory", f"none: master and moments ({waiting}) are on the host in every phase"
    else:
        why = (
            "none: no step of this stack is predicted; with predictor_state, predict_memory 'cpu' would clear "
            f"{waiting} of the card in PREDICT and fetch them ahead of their first use, to the bit"
        )
        yield "predict_memory", why


def _precision(answer: Recommendation) -> str:
    chosen = answer.chosen
    place = LEVELS.index(chosen.level)
    harsher = LEVELS[place + 1] if place + 1 < len(LEVELS) else None
    gentler = [option.tokens_per_s or 0.0 for option in answer.options if LEVELS.index(option.candidate.level) < place]
    if place == 0:
        why = "the most exact precision that is tried, and it fits"
    elif gentler:
        factor = chosen.tokens_per_s / max(gentler)
        why = f"{factor:.2f} times as fast as a more exact precision that fits"
    else:
        why = "the most exact that fits"
    if harsher is None:
        return f"{chosen.level.says}: {why}"
    saved = (_bytes(chosen.level) - _bytes(harsher)) * answer.request.model.num_params
    return (
        f"{chosen.level.says}: {why}; {harsher.says} would take {format_bytes(saved)} less, on card and host together"
    )


def _bytes(level: Numerics) -> float:
    """Return bytes per parameter of weights, their state and the gradients that wait."""
    return level.weight_bytes + level.state_bytes + level.grad_bytes


def _checkpointing(answer: Recommendation) -> str:
    chosen, blocks = answer.chosen, answer.request.model.num_blocks
    if chosen.keep_last >= blocks:
        return "every block keeps its activations: there is room, and nothing is computed twice"
    if not chosen.keep_last:
        return "every block is computed again in the backward pass: there is no room to keep the activations of one"
    more = f"; one more takes {format_bytes(chosen.kept_bytes)}" if chosen.kept_bytes else ""
    return f"the last {chosen.keep_last} of {blocks} blocks keep their activations, as many as there is room for{more}"


def _offload(answer: Recommendation) -> str:
    chosen = answer.chosen
    if not (chosen.arrangement.streams or chosen.arrangement.offloads_state):
        return "none: weights, state and gradients fit on the card"
    resident = f", {chosen.resident_layers} blocks stay on the card" if chosen.resident_layers else ""
    fused = "; gradients are used where they arise and never stored" if chosen.arrangement.fuses else ""
    return f"{chosen.arrangement.name}{resident}: the fastest offload at this precision that fits{fused}"
