"""Built on FSDP2: sharding as the plan lays it out, the order of its collectives, half precision."""

__all__ = ["gather", "reduce", "shard"]
