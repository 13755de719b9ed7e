"""`value_and_grad` for programs under plain `jax.jit`: no shard_map to write.

The path of a call, and the file of each part:

    arguments    The loss's arguments become a flat list of arrays; everything else is static.
    closures     Arrays that the loss closes over join that list.
    inference    Each array is split over the axis or replicated: known, inferred or refused.
    statistics   The loss is traced abstractly at two batch sizes. Values that grow are
                 per-example. Values that depend on the batch but do not grow are its statistics.
    outputs      Auxiliary outputs are concatenated, averaged, summed or returned as they are.
    batch_norm   BatchNorm of NNX and Linen is given the axis, so its statistics are global.
    step         In a shard_map, each rank differentiates the loss of its part of the batch, and
                 the gradients are reduced with compression (reduction, model_axes).
"""
