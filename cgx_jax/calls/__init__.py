"""The calls in the place of those of `lax`: sums, reduce-scatter, all-gather, layers ahead."""
