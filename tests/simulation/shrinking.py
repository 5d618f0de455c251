"""Fewer calls and faults of a history that still fails: what is left is easier to read."""

from __future__ import annotations

from simulation.schedule import Result, run

_MOST_RUNS = 300


def shrunk(failed: Result) -> Result:
    """Leave out calls, in ever smaller groups, then faults, as long as the history fails with an error of its kind."""
    best, kind, left_out, runs = failed, _kind(failed), frozenset(), 0
    size = len(best.calls)
    while size and runs < _MOST_RUNS:
        begin = 0
        while begin < len(best.calls):
            fewer = run(best.number, best.calls[:begin] + best.calls[begin + size :])
            runs += 1
            if _kind(fewer) == kind:
                best = fewer
            else:
                begin += size
        size //= 2
    for fault in [*best.faults]:
        if runs < _MOST_RUNS:
            fewer = run(best.number, best.calls, left_out | {fault})
            runs += 1
            if _kind(fewer) == kind:
                best, left_out = fewer, left_out | {fault}
    return best


def report(failed: Result) -> str:
    """The number of a history that has failed, and how, shortened."""
    best = shrunk(failed)
    return "\n".join(
        [
            f"history {failed.number} fails: {failed.error}",
            f"\nShortened from {len(failed.calls)} calls to {len(best.calls)}, and to {len(best.faults)} faults:",
            str(best.setup),
            *best.log,
            f"\n{best.error}",
        ]
    )


def _kind(result: Result) -> str:
    return result.error.partition(":")[0]
