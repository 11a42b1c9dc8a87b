"""The loop over steps: batches, the pipeline, the loss scale, metrics, checkpoints."""
