"""What takes the metrics of a run elsewhere: TensorBoard, Weights & Biases, MLflow, Trackio, the user's own.

All but TensorBoard, whose files need no more than its protocol buffers, are in processes of their own
(``worker``), which are given rows by ``logger_process``.
"""
