"""Simulators that the tests step.

| module | what it is for |
|---|---|
| `deterministic` | small simulators whose every number follows from seed and actions: the default of most tests |
| `every_space` | an agent for every kind of space, which returns the actions it got in its infos |
| `variable_agents`, `array_agents`, `stackable` | agents that end and join, for facades: dict spaces; arrays only; every agent a row |
| `dying_agents` | dict rules: agents end one after the other |
| `counting`, `paced` | which environment, seed and step an observation is from; steps that wait until they are released |
| `failing`, `crashing` | raise, exit, die or hang at a place; the same by environment, episode and step, again after restarts |
| `forking`, `stopping` | fork and let the child return; stop, or keep the interpreter's lock, while a large message is sent |
| `kinds`, `registered`, `dict_rules`, `tuple_envs` | every kind of simulator that adapters know; Gymnasium's registry; rules in detail |
| `masked_actions`, `vector_rewards` | action masks in every place and form; rewards that are vectors |
| `buggy` | one bug each, for `check`; `Healthy` has none |
| `unseeded_resets`, `one_per_process`, `failing_api_tests` | for `check`: global generators, libsumo's limit, a third party's tests fail |
| `waiting` | for `tune`: wait instead of computing, so that the best setting is known |
| `envpool_players`, `native_arena` | native simulators: in EnvPool's layout, and in arrays |
| `mlagents_arena`, `unity_player`, `rllib_envs` | ML-Agents' `BaseEnv`, Unity's side of its protocol, RLlib's environments |
"""
