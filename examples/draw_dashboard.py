"""Draw the panels of `grafana.json` from what a Prometheus server has stored.

    python examples/draw_dashboard.py --server http://127.0.0.1:9090 --minutes 10 --output dashboard.png

It needs `pip install matplotlib`, a Prometheus server, and a run that it reads, as `docs/monitoring.md` says.
"""

import argparse
import json
import time
import urllib.parse
import urllib.request
from pathlib import Path

import matplotlib.pyplot as plt

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--server", default="http://127.0.0.1:9090", help="address of Prometheus")
parser.add_argument("--minutes", type=float, default=10.0, help="how far to look back")
parser.add_argument("--output", type=Path, default=Path("dashboard.png"), help="the picture")
args = parser.parse_args()

dashboard = json.loads((Path(__file__).parent / "grafana.json").read_text())
end = time.time()


def curves(target):
    """The curves of a query of a panel: label, times in minutes, values."""
    query = target["expr"].replace("$__rate_interval", "30s").replace("$name", ".*")
    step = args.minutes * 60 / 200
    question = {"query": query, "start": end - 60 * args.minutes, "end": end, "step": step}
    with urllib.request.urlopen(f"{args.server}/api/v1/query_range?{urllib.parse.urlencode(question)}") as answer:
        found = json.load(answer)["data"]["result"]
    for series in found:
        label = target["legendFormat"]
        for name, value in series["metric"].items():
            label = label.replace(f"{{{{{name}}}}}", value)
        times, values = zip(*series["values"])
        yield label, [(moment - end) / 60 for moment in times], [float(value) for value in values]


figure, axes = plt.subplots(-(-len(dashboard["panels"]) // 3), 3, figsize=(18, 15), layout="constrained")
for panel, axis in zip(dashboard["panels"], axes.flat):
    axis.set_title(panel["title"], fontsize=11)
    defaults = panel["fieldConfig"]["defaults"]
    scale, unit = {"s": (1e3, "ms"), "bytes": (1e-6, "MB"), "percentunit": (100, "%")}.get(defaults["unit"], (1, ""))
    for target in panel["targets"]:
        for label, times, values in sorted(curves(target)):
            axis.plot(times, [scale * value for value in values], label=label, linewidth=1.2)
    if defaults.get("min") == 0:
        axis.set_ylim(bottom=0)
    axis.set_ylabel(unit)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, ncols=2)
for axis in axes[-1]:
    axis.set_xlabel("minutes")
figure.savefig(args.output, dpi=80)
print(f"wrote {args.output}")
