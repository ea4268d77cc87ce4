"""What is compiled of rssm_gru ahead of time: the predictor's model, with and without features, and both row blocks."""

from hybridkernels.compile_case import CompileCase
from hybridkernels.rssm_gru.triton_kernel import NUM_WARPS, RUN_TIME, TILES, kernel_constants, rssm_rollout_kernel

_SIZES = {"hidden": 256, "categoricals": 32, "classes": 32, "actions": 4, "width": 64}
"""Those of hybridtrain.hybrid.forecast.rssm_cell."""
_FEATURES = 51
_INTEGER_POINTERS = ("initial_classes", "classes")


def compile_cases(capability: int) -> list[CompileCase]:  # noqa: ARG001  the same on every card
    """Return the roll-out by rows of a program, and by whether the first tick is seen."""
    constants = {
        (rows, features): kernel_constants(**_SIZES, features=features, rows=rows)
        for rows in TILES
        for features in (0, _FEATURES)
    }
    arguments = {
        name: "i32" if name in RUN_TIME else "*i64" if name in _INTEGER_POINTERS else "*fp32"
        for name in rssm_rollout_kernel.arg_names
        if name not in constants[1, 0]
    }
    return [
        CompileCase(
            name=f"rssm_gru/{rows}_rows/{'seen' if features else 'unseen'}",
            kernel=rssm_rollout_kernel,
            arguments=arguments,
            constants=constant,
            unaligned=frozenset(RUN_TIME),
            num_warps=NUM_WARPS,
        )
        for (rows, features), constant in constants.items()
    ]
