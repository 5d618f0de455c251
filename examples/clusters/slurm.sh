#!/usr/bin/env bash
# A Slurm job: a Ray cluster on its nodes, and examples/ray_sharded_ippo.py on it with one learner on each node.
#
#     sbatch examples/clusters/slurm.sh                                  in the root of a checkout
#     sbatch --nodes=8 --cpus-per-task=32 examples/clusters/slurm.sh --total-steps 10000000
#
# Options before the script are Slurm's, those after it the example's. VENV is the virtual environment with this package,
# Ray, torch and tyro, on a file system that all nodes see; by default .venv. docs/clusters.md says what to change.
#
#SBATCH --job-name=sharded_ippo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=2G
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.log
# A minute before the time is over, this script gets SIGTERM, so that it can save Ray's logs.
#SBATCH --signal=B:TERM@60
set -euo pipefail

export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
export PYTHONUNBUFFERED=1

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
workers=$((SLURM_CPUS_PER_TASK - 1)) # on each node; its learner has the last CPU
# Jobs of others may run on the same node: ports and folders are this job's own. Paths of sockets must be short.
port=$((20000 + SLURM_JOB_ID % 4000 * 2))
folder=/tmp/ray-$SLURM_JOB_ID
logs=$PWD/logs-$SLURM_JOB_ID
mkdir -p "$logs"
# This script runs on the first node. Of several networks, this is the address in the first one.
address=$(hostname -I | cut -d " " -f 1)
export RAY_ADDRESS=$address:$port MASTER_ADDR=$address MASTER_PORT=$((port + 1))
# Without a token, every user of these machines could run code on this job's Ray cluster.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

# Steps of this job beside one another: without --overlap, a step waits until the CPUs of the others are free. No
# functions, so that `kill` ends srun itself and not a subshell.
step=(srun --overlap --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK")
on_all_nodes=("${step[@]}" --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}")

start_ray() {
    local node=$1
    shift
    "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$node" --output="$logs/ray-$node.log" \
        ray start --block --num-cpus="$workers" --temp-dir="$folder" --object-store-memory=1000000000 \
        --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 --disable-usage-stats "$@" &
}

# No `ray stop`: it would end the Ray of this user's other jobs on these nodes, too.
# shellcheck disable=SC2016  # the variables are those of the step
clean_up() {
    "${on_all_nodes[@]}" bash -c 'cp -rL "$1/session_latest/logs" "$2/$SLURMD_NODENAME"' copy "$folder" "$logs" || true
    mapfile -t steps < <(jobs -pr)
    [ "${#steps[@]}" -eq 0 ] || kill "${steps[@]}" || true
    wait
    "${on_all_nodes[@]}" rm -rf "$folder" || true
}
trap clean_up EXIT
trap 'exit 143' TERM

start_ray "${nodes[0]}" --head --node-ip-address="$address" --port="$port" --include-dashboard=false
head=$! seconds=0
until (: >"/dev/tcp/$address/$port") 2>/dev/null; do
    if [ $((seconds += 1)) -gt 120 ] || ! kill -0 "$head"; then
        echo "Ray's head did not start: see $logs/ray-${nodes[0]}.log" >&2
        exit 1
    fi
    sleep 1
done
for node in "${nodes[@]:1}"; do
    start_ray "$node" --address="$RAY_ADDRESS"
done
python - "${#nodes[@]}" "$logs" <<'PYTHON'
import sys
import time

import ray

wanted, deadline = int(sys.argv[1]), time.monotonic() + 300
ray.init(log_to_driver=False, logging_level="warning")
while (alive := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"{alive} of {wanted} nodes are there after 300 s: see {sys.argv[2]}")
    time.sleep(1)
print(f"{wanted} nodes with {ray.cluster_resources()['CPU']:.0f} CPUs for workers")
PYTHON

# If one learner fails, all end. In the background, because bash runs a trap only after the command in the foreground.
# shellcheck disable=SC2016  # the variables are those of the step
"${on_all_nodes[@]}" --kill-on-bad-exit=1 --label \
    bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec python examples/ray_sharded_ippo.py "$@"' learner \
    --num-nodes 1 --workers-per-node "$workers" --num-envs $((4 * workers * ${#nodes[@]})) "$@" &
wait $!
