"""What everything that watches a model run stands on: modes that see each operation, containers of tensors."""
