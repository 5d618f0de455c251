"""Runs examples/torchrun_ippo.py as a rank, and writes what its first update had and did to FOLDER/rank<n>.pt.

torchrun ... recorded_rank.py FOLDER [options of the example]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import torchrun_ippo as example
import tyro

folder, recorded = Path(sys.argv.pop(1)), {}
update, average_gradients, randperm = example.update, example.average_gradients, torch.randperm


def flat_gradient(module):
    return torch.cat([each.grad.flatten() for each in module.parameters()])


def recording_update(agent, optimizer, rollout, args, device):
    if not recorded:
        names = ("observations", "actions", "rewards", "done", "final_observations")
        recorded.update({name: getattr(rollout.torch(), name).clone() for name in names})
        recorded["before"] = {name: value.clone() for name, value in agent.state_dict().items()}
    update(agent, optimizer, rollout, args, device)
    recorded["after"] = torch.cat([each.detach().flatten() for each in agent.parameters()]).clone()


def recording_average(agent):
    own = flat_gradient(agent)
    average_gradients(agent)
    recorded.setdefault("own_gradient", own)
    recorded.setdefault("gradient", flat_gradient(agent))


def recording_randperm(count):
    order = randperm(count)
    recorded.setdefault("order", order)
    return order


example.update, example.average_gradients, torch.randperm = recording_update, recording_average, recording_randperm
args = tyro.cli(example.Args)
example.main(args)
torch.save(recorded, folder / f"rank{example.os.environ['RANK']}.pt")
