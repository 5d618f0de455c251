"""Run all benchmarks, one after the other, and put their tables into the documentation.

    python benchmarks/all.py                 everything that the installed libraries allow; some hours
    python benchmarks/all.py --only workers  the programs with this in their name
    python benchmarks/all.py --pages         only the tables, from saved results

Other packages need environments of their own (`.ci/*.txt` has versions that work together): run `compare_peers.py` and
`compare_facades.py` there, too. Their results are merged. `results/all.json` has the results of all programs.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from frame import RESULTS, Only

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
_TABLE = re.compile(r"^(<!-- .+?: (benchmarks/\w+\.py(?: --\w+)*) -->\n).*?^(<!-- end -->)$", re.DOTALL | re.MULTILINE)


class Program(NamedTuple):
    """A benchmark, with the libraries that it cannot do without, and its options."""

    name: str
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


PROGRAMS = (
    Program("compare_workers"),
    Program("cpu_times"),
    Program("many_agents"),
    Program("async_stepping"),
    Program("compare_peers"),
    Program("compare_facades"),
    Program("collect_rollouts", ("torch",)),
    Program("time_to_return", ("torch",)),
    Program("recovery"),
    Program("recycling"),
    Program("isolated_generators"),
    Program("envpool_overhead", ("envpool",)),
    Program("pools_overhead", ("vmas", "jaxmarl", "envpool")),
    Program("ray_calls", ("ray",)),
    Program("ray_scaling", ("ray",)),
    Program("ray_scaling", ("ray",), ("--nodes",)),
    Program("simulators"),
    Program("soak"),
    Program("summary"),
)


def main(
    only: Only = "", pages: Annotated[bool, typer.Option("--pages", help="Only put saved results into pages.")] = False
) -> None:
    """Run all benchmarks, and put their tables into the documentation; fails if one of them does."""
    failed = [] if pages else run(only)
    merge()
    for page in sorted(DOCS.rglob("*.md")):
        if (text := page.read_text(encoding="utf-8")) != (new := refreshed(text)):
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(DOCS.parent)}: new tables")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(only: str) -> list[str]:
    """Run the programs whose libraries are installed; returns the names of those that fail."""
    failed = []
    for program in PROGRAMS:
        missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
        if only not in program.name or missing:
            print(f"{program.name}: left out{f', needs {missing[0]}' if missing else ''}", flush=True)
            continue
        began = time.monotonic()
        command = [sys.executable, str(HERE / f"{program.name}.py"), *program.options]
        code = subprocess.run(command, check=False).returncode
        print(f"{program.name}: {time.monotonic() - began:.0f} s", flush=True)
        failed += [program.name] if code else []
    return failed


def merge() -> None:
    """Write the results of all programs into one file."""
    saved = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json")) if path.stem != "all"}
    (RESULTS / "all.json").write_text(json.dumps(saved, separators=(",", ":")) + "\n")


def refreshed(text: str) -> str:
    """A page with the tables of the saved results between its marks."""

    def table(found: re.Match[str]) -> str:
        script, *options = found[2].split()
        command = [sys.executable, str(HERE.parent / script), *options]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return f"{found[1]}{printed.strip()}\n{found[3]}"

    return _TABLE.sub(table, text)


if __name__ == "__main__":
    typer.run(main)
