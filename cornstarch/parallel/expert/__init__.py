"""Expert parallelism: each rank has some of the experts of every mixture-of-experts layer."""

from cornstarch.parallel.expert.dispatch import ExpertShards, get_expert_shards, measure_balance
from cornstarch.parallel.expert.shard_experts import (
    check_expert_plan,
    find_expert_modules,
    find_expert_replicas,
    find_experts,
    shard_experts,
)

__all__ = [
    "ExpertShards", "check_expert_plan", "find_expert_modules", "find_expert_replicas", "find_experts",
    "get_expert_shards", "measure_balance", "shard_experts",
]  # fmt: skip
