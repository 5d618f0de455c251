"""The Unity side of ML-Agents' protocol around an `Arena`: what a built Unity player does when it is started.

It connects to the port of its arguments, and replies until it gets a stop message or the connection ends.
`player_script`
makes an executable of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import grpc
from helpers.files import write_whole
from mlagents_envs.base_env import ActionTuple, BehaviorSpec
from mlagents_envs.communicator_objects.agent_info_pb2 import AgentInfoProto
from mlagents_envs.communicator_objects.brain_parameters_pb2 import ActionSpecProto, BrainParametersProto
from mlagents_envs.communicator_objects.command_pb2 import RESET
from mlagents_envs.communicator_objects.observation_pb2 import ObservationProto
from mlagents_envs.communicator_objects.unity_message_pb2 import UnityMessageProto
from mlagents_envs.communicator_objects.unity_output_pb2 import UnityOutputProto
from mlagents_envs.communicator_objects.unity_rl_initialization_output_pb2 import UnityRLInitializationOutputProto
from mlagents_envs.communicator_objects.unity_rl_output_pb2 import UnityRLOutputProto
from mlagents_envs.communicator_objects.unity_to_external_pb2_grpc import UnityToExternalProtoStub

from simulators.mlagents_arena import SPECS, Arena

STOP = 400


def player_script(folder: Path) -> str:
    """Write an executable player, which writes its process id to `<folder>/<port>`; return its path."""
    script = folder / "player"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {[*sys.path]!r}\nfrom simulators import unity_player\n"
        f"unity_player.play({str(folder)!r})\n"
    )
    script.chmod(0o755)
    return str(script)


def play(folder: str) -> None:
    """Run as a player.

    Args:
        folder: The folder for the file with the process id.
    """
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--mlagents-port", type=int)
    arguments.add_argument("--breaks-at-port", type=int)
    options, _ = arguments.parse_known_args()
    write_whole(Path(folder, str(options.mlagents_port)), str(os.getpid()))
    breaks = 3 if options.breaks_at_port == options.mlagents_port else None
    with grpc.insecure_channel(f"localhost:{options.mlagents_port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        exchange = UnityToExternalProtoStub(channel).Exchange
        first = UnityRLInitializationOutputProto(
            name="Arena", communication_version="1.5.0", package_version="2.1.0-exp.1"
        )
        first.capabilities.baseRLCapabilities = True
        answer = exchange(UnityMessageProto(unity_output=UnityOutputProto(rl_initialization_output=first)))
        arena = Arena(answer.unity_input.rl_initialization_input.seed, breaks=breaks, fault="exit")
        message = UnityMessageProto()
        while True:
            message.header.status = 200
            answer = exchange(message)
            if answer.header.status == STOP:
                return
            message = UnityMessageProto(unity_output=carry_out(arena, answer.unity_input.rl_input))


def carry_out(arena: Arena, request: Any) -> UnityOutputProto:
    """Apply a message to the arena and return the reply."""
    arena.hear(request.side_channel)
    output = UnityOutputProto()
    if request.command == RESET:
        arena.reset()
        output.rl_initialization_output.brain_parameters.extend(brain(name, spec) for name, spec in SPECS.items())
    else:
        for behavior, actions in request.agent_actions.items():
            arena.set_actions(behavior, together(SPECS[behavior], actions.value))
        arena.step()
    for behavior in SPECS:
        output.rl_output.agentInfos[behavior].CopyFrom(agent_infos(arena, behavior))
    return output


def brain(name: str, spec: BehaviorSpec) -> BrainParametersProto:
    branches = spec.action_spec.discrete_branches
    action_spec = ActionSpecProto(
        num_continuous_actions=spec.action_spec.continuous_size,
        num_discrete_actions=len(branches),
        discrete_branch_sizes=branches,
    )
    return BrainParametersProto(brain_name=name, is_training=True, action_spec=action_spec)


def together(spec: BehaviorSpec, actions: Any) -> ActionTuple:
    empty = spec.action_spec.empty_action(len(actions))
    for row, action in enumerate(actions):
        empty.continuous[row] = action.continuous_actions
        empty.discrete[row] = action.discrete_actions
    return empty


def agent_infos(arena: Arena, behavior: str) -> Any:
    infos = []
    for steps in arena.get_steps(behavior):
        for number in steps:
            step = steps[number]
            masks = getattr(step, "action_mask", None) or []
            infos.append(
                AgentInfoProto(
                    id=number,
                    reward=step.reward,
                    done=hasattr(step, "interrupted"),
                    max_step_reached=bool(getattr(step, "interrupted", False)),
                    action_mask=[bool(flag) for mask in masks for flag in mask],
                    group_id=step.group_id,
                    group_reward=step.group_reward,
                    observations=[
                        ObservationProto(
                            shape=one.shape, float_data=ObservationProto.FloatData(data=one.ravel().tolist())
                        )
                        for one in step.obs
                    ],
                )
            )
    return UnityRLOutputProto.ListAgentInfoProto(value=infos)
