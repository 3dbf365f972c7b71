"""What probes take in and give back: samples, canaries, limits, verdicts. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bwd.core.counters import Counters
from bwd.core.events import Cause
from bwd.core.starvation import Waits


class Outcome(StrEnum):
    """How a canary (one request for one token, past the front, straight to the engine) ended."""

    ANSWERED = "answered"
    TIMED_OUT = "timed out"  # taken, and no answer in time
    FAILED = "failed"  # answered with 5xx, or the connection broke
    NOT_ASKED = "not asked"  # could not connect, or refused with 4xx: says nothing of the engine


@dataclass(frozen=True, slots=True)
class Canary:
    """A canary that has ended; `started` and `ended` in monotonic seconds."""

    outcome: Outcome
    started: float
    ended: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the run that should run and does not. `name` as vLLM calls it ("Worker_TP1")."""

    pid: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.name else f"pid {self.pid}"


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen at one moment. Whatever could not be looked at is None or empty and named in
    `could_not` ("/metrics: answered HTML").

    counters         of the engine's /metrics; None: not readable this time
    in_flight        requests that front has passed on and that have not ended; None: not known
    served           responses that front has finished, plus what the engine's ten-second log lines say:
                     any number that grows with the engine's work. Counts only where the counters cannot
                     be read; None: not known
    canary           a canary that ended since the last sample
    canary_since     when the canary now in flight was started; None: none is
    stopped          processes of the run in state T or t
    gone             processes of the run's core (API server, EngineCore, workers) that ended, zombies too
    compiling        evidence of compile activity since the last sample ("ptxas", "3 new cache files")
    computing        evidence that the devices really compute (power near its limit on a GPU, CPU time
                     of a worker on a CPU), "" when not or not known
    suspicions       texts of SUSPECT lines since the last sample
    waits            what the threads of the engine's core got of the processors since the last sample; None:
                     not looked at (nothing stands still), or the kernel does not count it
    refused          nobody listens on the engine's socket (its queue being full is another matter)
    health           HTTP status of /health; None: no answer
    asleep           seconds that the machine was suspended since the last sample (boot time less
                     monotonic time)
    """

    counters: Counters | None = None
    in_flight: int | None = None
    served: float | None = None
    canary: Canary | None = None
    canary_since: float | None = None
    stopped: tuple[Process, ...] = ()
    gone: tuple[Process, ...] = ()
    compiling: str = ""
    computing: str = ""
    suspicions: tuple[str, ...] = ()
    waits: Waits | None = None
    refused: bool = False
    health: int | None = None
    asleep: float = 0.0
    could_not: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """Limits in seconds (design.md "Constants"). `step_tokens` is the most tokens that the engine takes
    in one step (max_num_batched_tokens, or max_model_len when that is smaller), `prefill_rate` tokens a
    second that this kind of engine reaches at the very least."""

    interval: float = 2.0
    suspect_interval: float = 1.0
    window: float = 10.0
    longest_window: float = 300.0  # vLLM ends a step itself then: VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    # A stopped or dead process needs no longer, whatever W is: with the snapshot, the kill and the backoff
    # of 5 s the next engine has to be on its way 20 s after the stall began.
    stopped_window: float = 10.0
    step_factor: float = 3.0
    canary_period: float = 30.0
    canary_timeout: float = 10.0
    step_tokens: int = 2048
    prefill_rate: float = 2000.0
    gap: float = 8.0
    compile_limit: float = 30 * 60.0  # FlashInfer's first JIT took 15 min (cases 2): then it is no excuse
    compute_limit: float = 300.0
    # An engine that waits for a processor is left alone for as long as it gets none. After this time (vLLM's
    # own limit of a step) it excuses none whose threads together had this much of a processor: that is more
    # than a canary needs, and nothing came of it, so those that wait are beside the point.
    starved_limit: float = 300.0
    starved_share: float = 0.1
    blind_window: float = 60.0  # without counters: so long, and so many canaries
    blind_canaries: int = 3


@dataclass(frozen=True, slots=True)
class Healthy:
    """Works, or is idle and answered lately. `why` is the evidence."""

    why: str


@dataclass(frozen=True, slots=True)
class Suspected:
    why: str


@dataclass(frozen=True, slots=True)
class Off:
    """Nothing can be seen that would show a hang: not healthy, not sick."""

    why: str


@dataclass(frozen=True, slots=True)
class Hung:
    cause: Cause


Verdict = Healthy | Suspected | Off | Hung
