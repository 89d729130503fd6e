"""The KV cache: pools of slots, block tables, layer groups, prefix cache, budget."""
