"""The comparison of a layout with one process: the certificate, and the oracle that judges."""
