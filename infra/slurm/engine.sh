#!/bin/bash
# One engine as a Slurm job. `rl360 fleet add --launcher slurm` submits it with --job-name, --output and --export set and
# the engine's arguments behind it; everything else is the operator's. Not run on a real cluster.
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=128G
#SBATCH --time=7-00:00:00
#SBATCH --no-requeue
set -euo pipefail
export HF_HUB_OFFLINE=1
# the engine's door serves callers of other nodes only with this deployment's token: a 0600 file that nodes can read
export RL360_TOKEN_FILE="${RL360_TOKEN_FILE:-$RL360_HOME/token}"
# fetched weights lie on the node: engines of other nodes have the same port, and must not share a folder
weights="${TMPDIR:-/tmp}/rl360-weights-${SLURM_JOB_ID:-$$}"
# --kill-on-bad-exit: a dead rank ends the step, so that nothing of the engine outlives the job
exec srun --kill-on-bad-exit=1 "${RL360_PYTHON:-python}" -m rl360.engines.launch --weights-dir "$weights" "$@"
