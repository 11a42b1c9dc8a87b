"""Metric services, and the child process that feeds each.

With one child for all services, one service could harm the others:

- A package that ends its process, or crashes in native code, would end all services. A new child could not
  tell which rows the others had sent, and would send some twice.
- A package that hangs while it holds the interpreter's lock would stop all threads of the process. The other
  services would then send no rows before ``logger.wait_s`` is over, and nobody could end the one that hangs.
- Packages print to standard output, in native code too. Each service has ``loggers/NAME.log`` for that, and
  threads of one process share standard output.

``launcher.process_pool`` does not fit either: its children end with their parent at once, and a full
connection makes the parent wait. A logger outlives a launcher that was killed, so that it can send the rows
that it has, and it never blocks the launcher.
"""
