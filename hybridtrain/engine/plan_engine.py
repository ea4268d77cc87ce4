"""Stores, executor and parameter pass of the active plan."""

from hybridtrain.engine.executor import Executor
from hybridtrain.engine.parameter_pass import ParameterPass, PassSettings
from hybridtrain.engine.weight_move import WeightMove
from hybridtrain.memory.formats import weight_formats
from hybridtrain.memory.shards import Shards
from hybridtrain.memory.state_store import StateStore
from hybridtrain.memory.weight_store import WeightStore
from hybridtrain.models.block_model import BlockModel
from hybridtrain.optim.optimizer import Optimizer
from hybridtrain.phase import Phase
from hybridtrain.plan.memory_plan import MemoryPlan, UpdateDevice, weight_storage
from hybridtrain.virtual_gpu.account.op_record import Stage


class PlanEngine:
    """Stores, executor and passes of a model; it starts with the plan of FULL.

    For the packed blocks of that plan the model is built with ``placeholder_scope``.

    Raises:
        ValueError: a phase stores weights in a format that cannot be trained.
    """

    def __init__(
        self, model: BlockModel, plans: MemoryPlan, optimizer: Optimizer, shards: Shards, *, wants_norm: bool
    ) -> None:
        full = self.current_plan = plans.for_phase(Phase.FULL)
        self._formats = {phase: weight_formats(plans.for_phase(phase)) for phase in Phase}
        self.memory_plan = plans
        self.model = model
        self._optimizer = optimizer
        self.copies = shards.copies
        with self.copies.observer.region(Stage.BUILD, ""):
            self.weights = WeightStore(model, full, shards)
        self.units = model.units()
        self.states = StateStore(full, self._formats[Phase.FULL], shards)
        self._stored_as = Phase.FULL
        """Phase whose plan decides how weights are stored and where master weights are."""
        self.executor = Executor(model, self.weights, full, shards, wants_norm=wants_norm)
        self._connect()

    def enter(self, phase: Phase, *, step: int, key: int) -> None:
        """Switch to the plan of another phase after ``step`` steps.

        ``key`` seeds stochastic rounding to narrower storage. The last visit's key takes precedence, as if it had
        written the narrower storage.
        """
        plan = self.memory_plan.for_phase(phase)
        moves = self._must_move(phase)
        if moves:
            self.states.leave_master()
        if phase is Phase.PREDICT:  # first what leaves the device, then what comes
            full = self.memory_plan.for_phase(Phase.FULL)
            if plan.optim_state != full.optim_state or plan.master != full.master:
                self.states.store_away(plan.optim_state, None if moves else plan.master, step=step)
        if moves:
            self.store_as(phase, key=key)
        if phase is not Phase.PREDICT:
            self.states.fetch_back()
            for unit in () if self.current_plan.async_restore else self.units:
                self.states.settled(unit.name)
        self.current_plan = plan
        self.executor.enter(plan, self.weights, runs_backward=phase is not Phase.PREDICT)

    def store_as(self, phase: Phase, *, key: int) -> Phase:
        """Store weights as in another phase, leaving all else in place; return their previous storage."""
        before, plan = self._stored_as, self.memory_plan.for_phase(phase)
        if not self._must_move(phase):
            return before
        with self.copies.observer.region(Stage.UPDATE, ""):
            old = self.weights
            self.weights = WeightStore(self.model, plan, Shards(self.copies), is_empty=True)
            last = self.parameters.last or PassSettings(seed=key)
            WeightMove(
                old, self.weights, self.states, self._formats[phase], plan.master.placement, last.rounds_to_nearest
            ).run(self.units, seed=last.seed)
        self._stored_as = phase
        self._connect()
        return before

    def _must_move(self, phase: Phase) -> bool:
        """Return whether a phase stores weights otherwise, or keeps master weights elsewhere for true steps."""
        now, plan = self.memory_plan.for_phase(self._stored_as), self.memory_plan.for_phase(phase)
        stays = phase is Phase.PREDICT or plan.master.placement is now.master.placement
        return weight_storage(now) != weight_storage(plan) or not stays

    def _connect(self) -> None:
        self.executor.weights = self.weights
        self.parameters = ParameterPass(
            self.units, self.weights, self.states, self._optimizer,
            on_host=self.current_plan.update_on is UpdateDevice.HOST,
            numbers={unit.name: number for number, unit in enumerate(self.model.units(everywhere=True))},
        )  # fmt: skip
