"""Which compressor each leaf takes: rules, statistics, solvers, and the policy that adapts."""
