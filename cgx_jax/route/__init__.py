"""The path of every call: which way its buffers travel, and the run from leaves to sums."""
