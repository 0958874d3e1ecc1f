#!/usr/bin/env bash
# A training job on several nodes without a scheduler, recorded as one run. On each node:
#
#     NODES=2 NODE=0 HEAD=node0 examples/multi_node.sh train.py --steps 100     # on node0
#     NODES=2 NODE=1 HEAD=node0 examples/multi_node.sh train.py --steps 100     # on node1
#
# The nodes share no disk: --gather copies all ranks into RUN of node 0 when the job ends.
set -euo pipefail

: "${NODES:?number of nodes}" "${NODE:?number of this node, from 0}" "${HEAD:?host name of node 0}"
RUN=${RUN:-runs/multi-node}
if [[ -z ${RANKS_PER_NODE:-} ]]; then
    RANKS_PER_NODE=$(python3 -c 'import torch; print(max(torch.cuda.device_count(), 1))')
fi

exec chopper record -o "$RUN" --gather -- torchrun \
    --nnodes="$NODES" --node-rank="$NODE" --nproc-per-node="$RANKS_PER_NODE" \
    --master-addr="$HEAD" --master-port="${MASTER_PORT:-29500}" "$@"
