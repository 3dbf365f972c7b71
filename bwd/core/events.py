"""The lifecycle's vocabulary: phases, causes, events (facts) and effects (orders). Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Phase(StrEnum):
    """Where the engine is."""

    STOPPED = "stopped"  # no engine; none wanted, or one is being prepared
    STARTING = "starting"  # process up, configuration read, communicator being made
    LOADING = "loading"  # weights on their way to memory
    WARMING = "warming"  # profile, compile, JIT, graph capture: minutes of honest silence
    READY = "ready"  # answers
    SUSPECT = "suspect"  # answers so far as anyone knows, but something does not add up
    DRAINING = "draining"  # no new requests; those in flight run to their end
    STOPPING = "stopping"  # told to go, or gone: waiting until nothing of the run is left
    BACKOFF = "backoff"  # waiting before the next try
    FATAL = "fatal"  # gave up: a person or a changed .env gets us out


class Prep(StrEnum):
    """What is being prepared, beside whatever the engine does."""

    NONE = "none"
    PROVISIONING = "provisioning"  # environment, build
    FETCHING = "fetching"  # weights
    CHECKING = "checking"  # settings, plan, preflight
    FAILED = "failed"


class Kind(StrEnum):
    """The class of a cause: it alone decides what happens next."""

    TRANSIENT = "transient"  # a hang, a death: again, with backoff, inside a budget
    STUCK_START = "stuck start"  # the start stands still: once more with the next plan down the ladder
    HELD = "held"  # somebody else has the port or the memory: wait with a limit
    CONFIG = "configuration"
    BUILD = "build"
    DRIVER = "driver"
    HARDWARE = "hardware"


RETRIED = frozenset({Kind.TRANSIENT, Kind.STUCK_START, Kind.HELD})
STARTS = frozenset({Phase.STARTING, Phase.LOADING, Phase.WARMING})
SERVES = frozenset({Phase.READY, Phase.SUSPECT})
ALIVE = STARTS | SERVES | {Phase.DRAINING}
HAS_ENGINE = ALIVE | {Phase.STOPPING}


class Rank(IntEnum):
    """How near a cause is to the root. Of several causes of one run the first of the highest rank is
    reported: never "Engine core initialization failed. See root cause above"."""

    FOLLOWS = 0  # says that something else went wrong
    GENERIC = 1  # may be the root, or follow from one: a dead worker, an exception nobody knows
    ROOT = 2


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something ended or was refused: class, id (a signature's, or one of ours), one line for the
    person, where it stands (".env:12 MAX_MODEL_LEN"), what would work, and its rank."""

    kind: Kind
    id: str
    text: str
    where: str = ""
    hint: str = ""
    rank: Rank = Rank.ROOT

    def line(self) -> str:
        where = f" ({self.where})" if self.where else ""
        hint = f". {self.hint[0].upper()}{self.hint[1:]}" if self.hint else ""
        return f"{self.text}{where}{hint}"


@dataclass(frozen=True, slots=True)
class PlanRef:
    """A launch plan as the machine needs to know it: its digest, its rung on the ladder (0 = as
    configured), how many rungs there are, and whether its start is a cold one (empty caches)."""

    digest: str
    rung: int = 0
    rungs: int = 1
    cold: bool = False


# ------------------------------------------------------------------ events: facts
@dataclass(frozen=True, slots=True)
class Event: ...


@dataclass(frozen=True, slots=True)
class Start(Event):
    """An engine is wanted (bwd came up, or a person asked)."""


@dataclass(frozen=True, slots=True)
class Stop(Event):
    """No engine is wanted."""


@dataclass(frozen=True, slots=True)
class Restart(Event):
    """A person asked for a new run of the same plan; re-arms FATAL."""


@dataclass(frozen=True, slots=True)
class SettingsChanged(Event):
    """The settings changed in a way that concerns the engine; re-arms FATAL."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Preparing(Event):
    """The preparation of `generation` has come to `prep`."""

    generation: int
    prep: Prep


@dataclass(frozen=True, slots=True)
class Prepared(Event):
    """Environment, weights and plan of `generation` are in place and the preflight passed."""

    generation: int
    plan: PlanRef


@dataclass(frozen=True, slots=True)
class PrepareFailed(Event):
    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class RunEvent(Event):
    run: int


@dataclass(frozen=True, slots=True)
class Communicating(RunEvent):
    """The communicator is being made (vLLM says which NCCL it uses): its deadline runs from here."""


@dataclass(frozen=True, slots=True)
class Loading(RunEvent): ...


@dataclass(frozen=True, slots=True)
class Warming(RunEvent): ...


@dataclass(frozen=True, slots=True)
class Answering(RunEvent):
    """The startup probe passed: the model is listed and the canary answered."""


@dataclass(frozen=True, slots=True)
class Progress(RunEvent):
    """The run moved: a marker, shard progress, a compiler at work."""


@dataclass(frozen=True, slots=True)
class Noticed(RunEvent):
    """An error line of the run. Only the first is kept: it is the root, the later ones follow from it."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Suspicion(RunEvent):
    """Something does not add up. `cause` names it where a line of the log does: it is kept like that of
    Noticed."""

    why: str
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Cleared(RunEvent): ...


@dataclass(frozen=True, slots=True)
class Failed(RunEvent):
    """The run is over although its process may live: a hang by verdict, or a dead engine."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Exited(RunEvent):
    code: int


@dataclass(frozen=True, slots=True)
class Drained(RunEvent):
    """The drain is over: nothing is in flight any more, or (`cut`) a person does not wait for what is."""

    cut: bool = False


@dataclass(frozen=True, slots=True)
class Reaped(RunEvent):
    """Processes, socket, shared memory and VRAM of the run are free."""


@dataclass(frozen=True, slots=True)
class Stuck(RunEvent):
    """Something of the run cannot be removed (a process in the driver, VRAM that stays taken)."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Starved(RunEvent):
    """What is left of the run was killed and waits for a processor to end on. `why` is the evidence."""

    why: str


@dataclass(frozen=True, slots=True)
class Adopted(RunEvent):
    """A run of an earlier bwd was found alive, with its identity proven."""

    plan: PlanRef
    phase: Phase


@dataclass(frozen=True, slots=True)
class Timeout(Event):
    """Made here, from Tick: the phase outlasted its limit."""


# ------------------------------------------------------------------ effects: orders to the shell
@dataclass(frozen=True, slots=True)
class Effect: ...


@dataclass(frozen=True, slots=True)
class Prepare(Effect):
    """Prepare settings, environment, weights, plan at `rung`; an older preparation is dropped."""

    generation: int
    rung: int


@dataclass(frozen=True, slots=True)
class CancelPrepare(Effect):
    """Stop the preparation of `generation`: nobody waits for it any more."""

    generation: int


@dataclass(frozen=True, slots=True)
class Spawn(Effect):
    run: int
    plan: PlanRef


@dataclass(frozen=True, slots=True)
class Snapshot(Effect):
    """Save what can be known of the run, before anything is killed."""

    run: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Drain(Effect):
    run: int


@dataclass(frozen=True, slots=True)
class Terminate(Effect):
    run: int


@dataclass(frozen=True, slots=True)
class Kill(Effect):
    run: int


@dataclass(frozen=True, slots=True)
class Reap(Effect):
    """Kill whatever of the run is left, wait until its processes, socket, shared memory and VRAM are
    free, then report Reaped; or Stuck."""

    run: int


@dataclass(frozen=True, slots=True)
class Remember(Effect):
    """This plan, below the configured one, reached READY: use it first next time on this machine."""

    plan: PlanRef


@dataclass(frozen=True, slots=True)
class Record(Effect):
    """One line for `bwd history` and the log."""

    what: str
    cause: Cause | None = None
