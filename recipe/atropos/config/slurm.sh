#!/bin/bash
#SBATCH --job-name=atropos
#SBATCH --nodes=<NODES>
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=atropos-%j.log
# USR1, 180 s before the end: the run saves after its step and ends, and the job is requeued, which resumes it.
# Whatever is lost (a node, Ray, the run) ends the allocation.
set -euo pipefail
cd <FOLDER>

python=<PYTHON>
options=(run.dir=runs/slurm-$SLURM_JOB_ID <OPTIONS>)
address() { # of the interface of this node to the one that is named
    "$python" -c "from recipe.atropos.utils.hosts import address_towards; print(address_towards('http://$1'))"
}
export -f address
export python ray="${python%/*}/ray"
head=$(address "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p || true)" || address "$HOSTNAME")
export RAY_ADDRESS=$head:6379 RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32) RAY_worker_niceness=0

srun --kill-on-bad-exit=1 bash -c '
    if [ "$SLURM_NODEID" = 0 ]; then
        exec env -u RAY_ADDRESS "$ray" start --block --head --port=6379 --include-dashboard=false --node-ip-address="${RAY_ADDRESS%:*}"
    fi
    until "$ray" health-check --address "$RAY_ADDRESS" 2>/dev/null; do sleep 1; done
    exec "$ray" start --block --address="$RAY_ADDRESS" --node-ip-address="$(address "${RAY_ADDRESS%:*}")"
' &
cluster=$!
trap 'kill $cluster 2>/dev/null; wait $cluster || true' EXIT

until "$ray" health-check --address "$RAY_ADDRESS" 2>/dev/null; do
    kill -0 $cluster
    sleep 1
done
"$python" -m recipe.atropos cluster check --nodes <NODES> --wait 600 "${options[@]}"

"$python" -m recipe.atropos train "${options[@]}" &
run=$!
trap 'kill -USR1 $run' USR1
status=0
while kill -0 $run 2>/dev/null; do
    wait -n $run $cluster && status=0 || status=$?
    kill -0 $cluster 2>/dev/null || kill $run 2>/dev/null || true
done
if [ $status = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
