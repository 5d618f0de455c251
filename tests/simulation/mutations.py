"""What the simulation would find: faults put into the pool on purpose, one at a time.

`python -m tests.simulation.mutations` copies the package into a temporary folder for each mutation, changes one place,
and carries out histories until one fails, at most 2,000. It can be interrupted, and goes on where it was. The last line
says how many were found.

    --name text       only mutations whose names have this text
    --processes 2     side by side
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from simulation.mutants import MUTATIONS, Mutation  # noqa: E402

ROOT = Path(__file__).parents[2]
MOST = 2000


def mutated(mutation: Mutation) -> str:
    """The text of the file with its fault; `ValueError` unless the text to be replaced occurs once."""
    text = (ROOT / "marl_parallel" / "core" / mutation.file).read_text()
    count = text.count(mutation.before)
    if count != 1:
        raise ValueError(f"{mutation.name!r}: the text to be replaced occurs {count} times in {mutation.file}")
    return text.replace(mutation.before, mutation.after)


def carry_out(mutation: Mutation, processes: int) -> dict[str, Any]:
    """Carry out histories with a mutation; returns the first one that fails, and how."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        left_out = shutil.ignore_patterns("__pycache__")
        for part in ("marl_parallel", "tests"):
            shutil.copytree(ROOT / part, tree / part, ignore=left_out)
        (tree / "marl_parallel" / "core" / mutation.file).write_text(mutated(mutation))
        command = [sys.executable, "-m", "tests.simulation", "--last", str(MOST), "--until-failure", "--processes"]
        environ = {**os.environ, "PYTHONPATH": folder}
        began = time.monotonic()
        command.append(str(processes))
        done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)
        found = re.search(r"^history (\d+) fails: (.*)$", done.stdout, re.MULTILINE)
        result: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        if found is not None:
            return {**result, "history": int(found[1]), "error": found[2][:200]}
        if done.returncode:
            raise RuntimeError(f"{mutation.name!r}: no history was carried out\n{done.stderr}")
        return {**result, "history": None}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations", description=(__doc__ or "")[:70])
    parser.add_argument("--name", default="")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--progress", type=Path, default=Path(".mutations-progress.json"))
    options = parser.parse_args(arguments)
    progress: dict[str, Any] = json.loads(options.progress.read_text()) if options.progress.exists() else {}
    chosen = [mutation for mutation in MUTATIONS if options.name in mutation.name]
    for mutation in chosen:
        mutated(mutation)  # raises if the code has changed
    for mutation in chosen:
        key = json.dumps(mutation[:4])
        if key in progress:
            continue
        progress[key] = result = carry_out(mutation, options.processes)
        options.progress.write_text(json.dumps(progress, indent=1))
        what = "SURVIVES" if result["history"] is None else f"history {result['history']}: {result['error'][:90]}"
        print(f"{mutation.name}: {what} ({result['seconds']} s)", flush=True)
    results = [(mutation, progress[json.dumps(mutation[:4])]["history"]) for mutation in chosen]
    survivors = [mutation for mutation, history in results if history is None]
    for mutation in survivors:
        print(f"not found: {mutation.name}{': ' + mutation.survives if mutation.survives else ''}")
    print(f"{len(results) - len(survivors)} of {len(results)} mutations were found, each within {MOST} histories")
    return any(not mutation.survives for mutation in survivors)


if __name__ == "__main__":
    sys.exit(main())
