"""Random programs: Hypothesis makes up sequences of calls and compares every answer with a dict."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from hicache_conformance.case import case
from hicache_conformance.harness import Harness
from hicache_conformance.machine import KillMachine, StackMachine, StoreMachine


def _run(h: Harness, machine: type[StoreMachine], examples: int, steps: int, shrink: bool) -> None:
    bound: type[StoreMachine] = type(machine.__name__, (machine,), {"harness": h})
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(h.seed)(bound), settings=how)


@case("stateful", seconds=120)
def programs_over_the_bare_backend(h: Harness) -> None:
    """Any sequence of set, get, exists, delete, clear, reopen over several clients and namespaces does
    what a dict would.

    Bugs of this field seldom need more than five calls, but nobody had tried these five (sglang#24990).
    """
    _run(h, StoreMachine, examples=15, steps=25, shrink=True)


@case("stateful", seconds=120)
def programs_through_the_layers(h: Harness) -> None:
    """The same through the SDK, with objects being damaged in between: never a wrong byte, always healed."""
    _run(h, StackMachine, examples=12, steps=25, shrink=False)


@case("stateful", needs=("persistent", "shared"), level="crash-safe", seconds=180)
def programs_with_kills(h: Harness) -> None:
    """The same with processes that write to the store and are killed in between.

    Mooncake#1336, Mooncake#2246: what a restart forgets; sglang#29969: what a crash leaves half done.
    """
    _run(h, KillMachine, examples=3, steps=12, shrink=False)
