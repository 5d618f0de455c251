"""Use an installed package from a folder outside of the checkout: `python use_package.py CODEC`.

Types are for the type checkers: mypy and pyright must find those of the package.
"""

import sys

import marl_parallel
from marl_parallel import ParallelEnv, make

assert marl_parallel.codec == sys.argv[1], f"expected the codec {sys.argv[1]!r}, got {marl_parallel.codec!r}"
with make("mpe2.simple_spread_v3", num_envs=2, num_workers=2) as env:
    made: ParallelEnv = env
    made.reset(seed=1)
    rewards = made.step(made.sample_actions())[1]
assert [*rewards[1]] == ["agent_0", "agent_1", "agent_2"], rewards
print(f"marl-parallel {marl_parallel.__version__} at {marl_parallel.__file__}, codec {marl_parallel.codec}")
