"""A group becomes tensors: rows, verl's ``DataProto``, sampling parameters, and batches to be replayed."""
