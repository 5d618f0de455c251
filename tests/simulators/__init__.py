"""Simulators that the tests step.

deterministic       every number follows from seed and actions: the default of most tests
every_space         an agent for every kind of space, which returns the actions it got in its infos
variable_agents     agents that end and join, observe and act in dicts, with infos of every kind: for facades
array_agents        the same with arrays and numbers alone
stackable           several of these, of which every agent has a row in arrays
dying_agents        dict rules: agents end one after the other
returning_agents    agents come back after their end, under dict rules and under PettingZoo's
counting            observations say which environment, seed, episode and step they are from
paced               steps last until the test releases them
failing             raises, exits, dies or hangs at a place
crashing            the same, by environment, episode and step, and again after restarts
forking             forks, and the child returns into the caller's code
stopping            stops, or keeps the interpreter's lock, while a large message is sent
sharing             share objects of `multiprocessing` with the program and with each other
kinds               one small simulator of each kind that adapters know
registered          registers itself with Gymnasium
dict_rules          dict rules in detail
tuple_envs          in the form of LBF, highway-env, POGEMA and ma-gym
masked_actions      action masks in every place and form
rollouts            infos of every place, and truncations without a last observation: for `Rollout`
vector_rewards      rewards that are vectors
unreadable_values   rewards, flags and observations that raise when they are read
buggy               one bug each, for `check`; `Healthy` has none
unseeded_resets     for `check`: resets that draw from a global or unseeded generator
one_per_process     for `check`: only one may be open in a process, as with libsumo
failing_api_tests   for `check`: PettingZoo's own tests fail, end the process or hang
one_object          for tests of environments in one process: constructors that return one object, or wrap one
waiting             for `tune`: waits instead of computing, so that the best setting is known
envpool_players     a pool in EnvPool's layout
native_arena        a `NativeSimulator` in arrays
mlagents_arena      a `BaseEnv` of ML-Agents
unity_player        Unity's side of ML-Agents' protocol
rllib_envs          environments of RLlib's kind
"""
