"""Loggers: they send the metrics of a run to TensorBoard, Weights & Biases, MLflow, Trackio, a user's class.

All but TensorBoard, whose files need no more than its protocol buffers, are in processes of their own
(``worker``), which are given rows by ``logger_process``.
"""
