"""Many histories: `python -m tests.simulation --last 100000`. It can be interrupted, and goes on where it was.

Its progress is a file, by default `.simulation-progress.json` in the current folder: the groups of histories that have
been carried out, and the numbers that have failed. `--number 17` carries out one history and prints it, shortened if it
fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from simulation.many import carry_out, set_up  # noqa: E402
from simulation.schedule import run  # noqa: E402
from simulation.shrinking import report  # noqa: E402

_AT_ONCE = 50


def _one(number: int) -> int:
    result = run(number)
    print(report(result) if result.error else "\n".join([str(result.setup), *result.log, "nothing is wrong"]))
    return bool(result.error)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, help="carry out this history only, and print it")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=100_000, help="the number after the last history")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pure", action="store_true", help="without compiled code")
    parser.add_argument("--until-failure", action="store_true", help="end at the first history that fails")
    parser.add_argument("--progress", type=Path, default=Path(".simulation-progress.json"))
    options = parser.parse_args(arguments)
    if options.number is not None:
        set_up(options.pure)
        return _one(options.number)
    scope = f"{options.first} {options.last} {options.pure}"
    progress: dict[str, Any] = {"scope": scope, "done": [], "checked": 0, "kinds": {}, "failed": {}}
    if options.progress.exists():
        stored = json.loads(options.progress.read_text())
        if stored["scope"] != scope:
            parser.error(f"{options.progress} is of other histories ({stored['scope']}): remove it, or pass --progress")
        progress = stored
    groups = range(options.first, options.last, _AT_ONCE)
    done = {*progress["done"]}
    left = [(first, min(first + _AT_ONCE, options.last)) for first in groups if first not in done]
    print(f"{len(groups) - len(left)} of {len(groups)} groups of {_AT_ONCE} histories have been carried out before")
    began, histories = time.monotonic(), 0
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.processes, context, set_up, (options.pure,))
    try:
        waiting = [pool.submit(carry_out, *group) for group in left]
        for group, result in zip(left, waiting, strict=True):
            first, checked, kinds, failed = result.result()
            histories += group[1] - group[0]
            progress["done"].append(first)
            progress["checked"] += checked
            progress["kinds"] = dict(Counter(progress["kinds"]) + kinds)
            progress["failed"].update({str(number): error for number, error in failed.items()})
            for number, error in failed.items():
                print(f"history {number} fails: {error.splitlines()[0]}", flush=True)
            if failed and options.until_failure:
                pool.shutdown(cancel_futures=True)
                return 1
            partial = options.progress.with_suffix(".partial")
            partial.write_text(json.dumps(progress))
            partial.replace(options.progress)
            if histories % (20 * _AT_ONCE) == 0:
                rate = histories / (time.monotonic() - began)
                print(f"{group[1]} of {options.last}, {rate:.0f} histories a second", flush=True)
    except KeyboardInterrupt:
        pool.shutdown(cancel_futures=True)
        print("interrupted: the same command goes on from here")
        return 130
    pool.shutdown()
    faults = sum(progress["kinds"].values())
    print(f"{progress['checked']} results checked, {faults} faults, {len(progress['failed'])} histories fail")
    for number in [*progress["failed"]][:10]:
        print(f"python -m tests.simulation --number {number}{' --pure' * options.pure}")
    return bool(progress["failed"])


if __name__ == "__main__":
    sys.exit(main())
