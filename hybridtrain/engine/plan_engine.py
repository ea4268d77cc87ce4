"""Everything that realises the plan in force: stores, executor, update, sweep. It changes when another plan comes."""

from hybridtrain.engine.executor import Executor
from hybridtrain.engine.parameter_pass import ParameterPass, PassSettings
from hybridtrain.engine.weight_move import WeightMove
from hybridtrain.memory.copy_engine import CopyEngine
from hybridtrain.memory.formats import WeightFormats, adapter_formats, int8_codes, weight_formats
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import BlockModel
from hybridtrain.optim.optimizer import Optimizer
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan, PhasePlan, UpdateDevice, weight_storage
from hybridtrain.virtual_gpu.account.observer import MemoryObserver, Stage


class PlanEngine:
    """Begins under the plan of FULL.

    Args:
        model: Built with ``placeholder_scope`` for the packed blocks of that plan.
        plans: Of all phases.
        optimizer: Updates the weights.
        copies: The device, and the way to the other tiers.
        observer: Told what each tensor is for.
        wants_norm: Whether the norm of the gradients will be asked for.
        shards: What of everything this rank holds.

    Raises:
        ValueError: a phase stores weights as nothing could train them.
    """

    def __init__(
        self,
        model: BlockModel,
        plans: MemoryPlan,
        optimizer: Optimizer,
        copies: CopyEngine,
        observer: MemoryObserver,
        *,
        wants_norm: bool,
        shards: Shards,
    ) -> None:
        self.plan = plans.for_phase(Phase.FULL)
        self._formats = {phase: _formats(plans.for_phase(phase)) for phase in Phase}
        self._plans = plans
        self._model = model
        self._optimizer = optimizer
        self._copies = copies
        self._shards = shards
        self._observer = observer
        with observer.region(Stage.BUILD, ""):
            self.weights = WeightStore(model, self.plan, copies, observer, shards=shards)
        self.units = model.units()
        self.states = StateStore(self.plan, self._formats[Phase.FULL], copies, observer, shards)
        self._stored_as = Phase.FULL
        """Phase whose plan says how weights are stored, and where companions are unless they were stored away."""
        self.executor = Executor(
            model, self.weights, self.plan, wants_norm=wants_norm, copies=copies, observer=observer, shards=shards
        )
        self._connect()

    def enter(self, phase: Phase, *, step: int, key: int) -> None:
        """Let the plan of a phase be in force.

        Args:
            phase: Another one than before.
            step: Steps done so far.
            key: Of stochastic rounding where storage is narrower than before; a sweep's key comes first, so that its
                results are rounded as if it had worked on the narrower ones.
        """
        plan = self._plans.for_phase(phase)
        moves = self._must_move(phase)
        if moves:
            self.states.leave_master()
        if phase is Phase.PREDICT:  # first what leaves the device, then what comes
            full = self._plans.for_phase(Phase.FULL)
            if plan.optim_state != full.optim_state or plan.master != full.master:
                self.states.store_away(plan.optim_state, None if moves else plan.master, step=step)
        if moves:
            self.store_as(phase, key=key)
        if phase is not Phase.PREDICT:
            self.states.fetch_back()
            if not self.plan.async_restore:
                for unit in self.units:
                    self.states.settled(unit.name)
        self.plan = plan
        self.executor.enter(plan, self.weights, runs_backward=phase is not Phase.PREDICT)

    def store_as(self, phase: Phase, *, key: int) -> Phase:
        """Store weights as a phase does, all else staying where it is; return how they were stored.

        Args:
            phase: The one whose plan says how.
            key: As for ``enter``.
        """
        before, plan = self._stored_as, self._plans.for_phase(phase)
        if not self._must_move(phase):
            return before
        with self._observer.region(Stage.UPDATE, ""):
            old = self.weights
            new = WeightStore(self._model, plan, self._copies, self._observer, is_empty=True)
            move = WeightMove(
                old, new, self.states, self._formats[phase], plan.master.placement, self._copies, self._observer
            )
            last = self.parameters.last or PassSettings(seed=key)
            move.run(self.units, seed=last.seed, nearest=last.rounds_to_nearest)
            self.weights = new
        self._stored_as = phase
        self._connect()
        return before

    def _must_move(self, phase: Phase) -> bool:
        """Return whether a phase stores weights otherwise, or keeps companions elsewhere for true steps."""
        now, plan = self._plans.for_phase(self._stored_as), self._plans.for_phase(phase)
        stays = phase is Phase.PREDICT or plan.master.placement is now.master.placement
        return weight_storage(now) != weight_storage(plan) or not stays

    def _connect(self) -> None:
        units, on_host = self.units, self.plan.update_on is UpdateDevice.HOST
        self.executor.weights = self.weights
        self.parameters = ParameterPass(
            units, self.weights, self.states, self._optimizer, self._copies, self._observer, on_host=on_host,
            shards=self._shards,
            numbers={unit.name: number for number, unit in enumerate(self._model.units(everywhere=True))},
        )  # fmt: skip


def _formats(plan: PhasePlan) -> WeightFormats:
    if plan.adapter_rank:
        return adapter_formats(plan.master.codec, plan.compute_dtype)
    return weight_formats(
        plan.weight.codec, plan.master.codec, plan.compute_dtype, static_scales=plan.static_scales,
        int8=int8_codes(plan),
    )  # fmt: skip
