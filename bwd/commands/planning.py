"""The plan that `bwd serve` would launch now, as far as it is known without fetching or installing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bwd.adapters import environments, model_folder, p2p, run_file, weights
from bwd.adapters.environments import EngineEnv
from bwd.core.engine_choice import EngineChoice, model_id
from bwd.core.host import HostFacts
from bwd.core.model import ModelFacts
from bwd.core.plan import LaunchPlan, PlanPaths, make_plan
from bwd.core.settings import Settings
from bwd.paths import Paths


@dataclass(frozen=True, slots=True)
class Draft:
    """What the plan is made from: the engine's environment and the model where they are here already.
    `missing` says what is not, and what becomes of it."""

    choice: EngineChoice
    named: str
    env: EngineEnv | None
    facts: ModelFacts | None
    where: PlanPaths
    missing: tuple[str, ...]

    def plan(
        self, paths: Paths, settings: Settings, host: HostFacts, own_pids: frozenset[int] = frozenset()
    ) -> LaunchPlan:
        """`own_pids` are the engine's that runs now, whose memory will be free. Raises PlanError."""
        remembered = run_file.read_json(paths.remembered)
        return make_plan(
            settings,
            host,
            self.facts,
            self.where,
            remembered=remembered if isinstance(remembered, Mapping) else None,
            p2p_verdict=p2p.verdict(paths),
            own_pids=own_pids,
        )


def look(paths: Paths, settings: Settings, choice: EngineChoice, *, on_its_way: bool = False) -> Draft:
    """Look for environment and weights; `on_its_way` takes a model whose weights are still being fetched for
    one that is here, as the plan will be when they are. Raises ValueError for a config.json that is no
    model's."""
    env = environments.engine_env(choice.engine, paths, settings)
    named = model_id(settings.model, choice.engine)
    find = weights.with_small_files if on_its_way else weights.present
    folder = find(paths, named, settings.model_revision)
    facts = None
    if folder is not None and (folder / "config.json").is_file():
        facts = model_folder.read(folder, named)
        if (due := weights.bytes_due(folder)) is not None:
            facts = replace(facts, weight_bytes=due)
    python = env.python if env is not None else environments.places(choice.engine, paths)[-1] / "bin/python"
    where = PlanPaths(
        python=str(python),
        model_path=str(folder if folder is not None else paths.models / named),
        uds=str(paths.engine_socket),
        cache=str(paths.cache),
        site=str(paths.engine_site),
        marlin_act8=environments.marlin_act8(env, settings),
    )
    missing = []
    if env is None:
        missing.append(f"the {choice.engine} environment is not installed yet; serve installs it")
    if facts is None:
        missing.append(f"the weights of {named} are not here yet; what they decide is not final")
    return Draft(choice, named, env, facts, where, tuple(missing))
