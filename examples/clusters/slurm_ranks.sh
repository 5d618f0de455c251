#!/usr/bin/env bash
# A Slurm job: examples/torchrun_ippo.py on its nodes, one rank on each, without Ray.
#
#     sbatch examples/clusters/slurm_ranks.sh                            in the root of a checkout
#     sbatch --nodes=8 --cpus-per-task=32 examples/clusters/slurm_ranks.sh --total-steps 10000000
#     sbatch --gpus-per-node=4 --ntasks-per-node=4 examples/clusters/slurm_ranks.sh       a rank for each GPU
#
# Options before the script are Slurm's, those after it the example's. VENV is the virtual environment with this package,
# torch and tyro, on a file system that all nodes see; by default .venv.
#
#SBATCH --job-name=ranks_ippo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=2G
#SBATCH --time=02:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail

export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
export PYTHONUNBUFFERED=1

# Since Slurm 22.05, srun does not take the number of CPUs from sbatch. If one rank fails, all end.
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --label \
    python examples/torchrun_ippo.py --num-workers "$SLURM_CPUS_PER_TASK" --num-envs $((4 * SLURM_CPUS_PER_TASK)) "$@"
